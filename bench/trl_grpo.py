"""One run of TRL's GRPO trainer for `bench/main_job.py`, with the Python of TRL's own environment.

    python bench/trl_grpo.py MODEL STEPS SEED OUT_JSON FOLDER

Writes `{"rewards": [...], "step_times": [...]}`.
"""

import difflib
import json
import random
import string
import sys
import time
from pathlib import Path

from datasets import Dataset
from transformers import PreTrainedTokenizerFast, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

model, steps, seed, out, folder = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], sys.argv[5]
rng = random.Random(seed)
texts = ["".join(rng.choices(string.ascii_lowercase, k=rng.randint(4, 8))) for _ in range(16 * steps)]
data = Dataset.from_list([{"prompt": [{"role": "user", "content": t}], "answer": t[::-1]} for t in texts])
rewards, step_times = [], []


def reward(completions, answer, **_):
    given = [c[0]["content"] for c in completions]
    found = [difflib.SequenceMatcher(None, g, a).ratio() for g, a in zip(given, answer, strict=True)]
    rewards.append(sum(found) / len(found))
    return found


class Clock(TrainerCallback):
    def on_step_end(self, *_args, **_kwargs):
        step_times.append(time.time())


config = GRPOConfig(
    output_dir=folder,
    max_steps=steps,
    seed=seed,
    use_cpu=True,
    bf16=False,
    report_to=[],
    save_strategy="no",
    per_device_train_batch_size=128,
    num_generations=8,
    max_completion_length=12,
    temperature=1.0,
    top_p=1.0,
    learning_rate=3e-4,
    lr_scheduler_type="constant_with_warmup",
    warmup_steps=3,
    adam_beta2=0.95,
    max_grad_norm=1.0,
    beta=0.0,
    epsilon=0.2,
    epsilon_high=0.28,
    logging_steps=1,
    disable_tqdm=True,
    gradient_checkpointing=False,
    scale_rewards="none",
    loss_type="dapo",
)
tokenizer = PreTrainedTokenizerFast.from_pretrained(model, padding_side="left")
trainer = GRPOTrainer(
    model=model,
    reward_funcs=reward,
    args=config,
    train_dataset=data,
    processing_class=tokenizer,
    callbacks=[Clock()],
)
trainer.train()
Path(out).write_text(json.dumps({"rewards": rewards, "step_times": step_times}))
