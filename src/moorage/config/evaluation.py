"""`moorage eval @ eval.toml`: measuring a model on environments, without training."""

from __future__ import annotations

from pydantic import Field, model_validator

from moorage.config.base import Config
from moorage.config.engine import InferenceConfig
from moorage.config.env import EvalSourceConfig, SamplingConfig
from moorage.config.limits import dtype_conflicts, join_conflicts
from moorage.config.model import ModelConfig


class EvaluationConfig(Config):
    """One measurement. Started again with the same name it runs what is missing."""

    name: str = "eval"
    """Name of the measurement; its folder is `<output_dir>/<name>`."""

    output_dir: str = "evals"
    """Folder of all measurements."""

    model: ModelConfig
    """What is measured: a folder in Hugging Face layout, served by an engine that is started for it.
    With `endpoint` only its tokenizer is read, and `name` is the name under which the endpoint serves."""

    endpoint: str | None = None
    """Address of an engine that somebody else runs (`http://host:port`). None: start one for `model.path`."""

    inference: InferenceConfig = InferenceConfig()
    """The engine that is started when there is no endpoint."""

    sources: list[EvalSourceConfig] = Field(default_factory=list)
    """The environments (`[[sources]]`)."""

    group_size: int = Field(default=1, ge=1)
    """Episodes per task (k of avg@k)."""

    sampling: SamplingConfig = SamplingConfig()
    """How the model is sampled."""

    seq_len: int = Field(default=2048, ge=8)
    """Longest sequence that the started engine serves."""

    max_inflight: int = Field(default=256, ge=1)
    """Episodes running at a time."""

    retries: int = Field(default=1, ge=0)
    """How often an episode lost to an infrastructure failure is run again."""

    version: int = Field(default=0, ge=0)
    """Number of the checkpoint that is measured, for labels."""

    seed: int = 0
    """Seed of the started engine."""

    @model_validator(mode="after")
    def _check(self) -> EvaluationConfig:
        if not self.sources:
            raise ValueError("sources names no environment; add a [[sources]] block")
        names = [source.name for source in self.sources]
        if len(set(names)) != len(names):
            raise ValueError(f"two sources share a name ({names}); set `name`")
        if conflicts := self._engine_conflicts():
            raise ValueError(join_conflicts(conflicts))
        return self

    def _engine_conflicts(self) -> list[str]:
        engine = self.inference
        found = []
        if engine.urls:
            found.append("inference.urls has no effect on an evaluation; name the engine with `endpoint`")
        if engine.replicas > 1:
            found.append("inference.replicas has no effect: an evaluation starts one engine; leave it out")
        if self.endpoint is None:
            found += dtype_conflicts(self.model.dtype if engine.dtype == "auto" else engine.dtype)
        return found
