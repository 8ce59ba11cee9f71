from __future__ import annotations

import random
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from renderers.base import RenderedTokens
from renderers.default import DefaultRenderer

from moorage.core.errors import ConfigError
from moorage.engine.render import RendererPool, load_tokenizer, make_renderer
from moorage.engine.template import TemplateRenderer

TEXT = st.text(alphabet=[chr(c) for c in range(32, 127)] + ["\n"], max_size=12)
END, ASSISTANT = 1, 4


@pytest.fixture(scope="module")
def pool(dense_model: Path) -> RendererPool:
    return RendererPool(dense_model)


@pytest.fixture(scope="module")
def tokenizer(dense_model: Path) -> Any:
    return load_tokenizer(dense_model)


def message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def test_a_prompt_ends_where_the_answer_begins(pool: RendererPool) -> None:
    rendered = pool.render([message("user", "abc")])
    assert rendered.token_ids == [3, 72, 73, 74, END, ASSISTANT]
    assert rendered.message_indices == [0, 0, 0, 0, 0, -1]
    assert rendered.message_token_spans() == [(0, 5)]
    assert pool.stop_token_ids == [END]


@given(
    st.lists(
        st.tuples(st.sampled_from(["system", "user", "assistant", "tool"]), TEXT), min_size=1, max_size=5
    )
)
@settings(max_examples=60, deadline=None)
def test_ids_and_attribution_equal_those_of_the_renderers_package(
    pool: RendererPool, tokenizer: Any, turns: list[tuple[str, str]]
) -> None:
    messages: list[Any] = [message(role, content) for role, content in turns]
    mine = pool.render(messages)
    theirs = DefaultRenderer(tokenizer).render(messages, add_generation_prompt=True)
    assert mine == theirs


@given(st.lists(st.integers(1, 127), max_size=12))
@settings(max_examples=60, deadline=None)
def test_parsing_equals_that_of_the_renderers_package(
    pool: RendererPool, tokenizer: Any, completion: list[int]
) -> None:
    prompt = pool.render([message("user", "q")]).token_ids
    theirs = DefaultRenderer(tokenizer).parse_response(completion, prompt_ids=prompt)
    assert pool.parse(completion, prompt_ids=prompt) == theirs


def test_reasoning_is_left_to_the_renderers_package(pool: RendererPool, tokenizer: Any) -> None:
    ids = tokenizer.encode("<think>why</think>so", add_special_tokens=False)
    parsed = pool.parse([*ids, END])
    assert (parsed.reasoning_content, parsed.content) == ("why", "so")


@given(TEXT, TEXT, st.lists(st.tuples(st.sampled_from(["user", "tool"]), TEXT), min_size=1, max_size=3))
@settings(max_examples=60, deadline=None)
def test_a_continued_turn_keeps_its_ids_and_equals_a_fresh_render(
    pool: RendererPool, tokenizer: Any, question: str, answer: str, tail: list[tuple[str, str]]
) -> None:
    opening = [message("system", "s"), message("user", question)]
    prompt = pool.render(opening).token_ids
    completion = [*tokenizer.encode(answer, add_special_tokens=False), END]
    new = [message(role, content) for role, content in tail]
    bridged = pool.bridge(prompt, completion, new)
    assert bridged is not None
    fresh = pool.render([*opening, message("assistant", answer), *new])
    assert bridged.token_ids == fresh.token_ids
    assert bridged.message_indices[: len(prompt) + len(completion)] == [-1] * (len(prompt) + len(completion))
    spans = RenderedTokens(
        message_indices=bridged.message_indices, message_roles=bridged.message_roles
    ).message_token_spans()
    assert spans == fresh.message_token_spans()[3:]


def test_a_completion_cut_short_is_closed_and_odd_ids_are_kept(pool: RendererPool) -> None:
    prompt = pool.render([message("user", "q")]).token_ids
    cut = [80, 3, 81]  # holds a role marker that no fresh render would give back
    bridged = pool.bridge(prompt, cut, [message("user", "go on")])
    assert bridged is not None
    assert bridged.token_ids[: len(prompt) + 4] == [*prompt, 80, 3, 81, END]


@pytest.mark.parametrize(
    "tail", [[], [message("assistant", "x")], [message("system", "x")]], ids=["none", "assistant", "system"]
)
def test_a_tail_that_is_no_question_is_rendered_afresh(
    pool: RendererPool, tail: list[dict[str, str]]
) -> None:
    assert pool.bridge([3, 72, END, ASSISTANT], [80, END], tail) is None


def template_renderer(tokenizer: Any, template: str) -> TemplateRenderer:
    tokenizer.chat_template = template
    return TemplateRenderer(tokenizer)


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{{ m.content }}<|end|>{% endfor %}{# strips thinking #}",
        "{{ messages[-1].content }}<|end|>",
        "{% if messages[0].role != 'system' %}{{ raise_exception('system first') }}{% endif %}x<|end|>",
        "{% for m in messages %}{{ m.tool_calls[0].function.name if m.tool_calls }}<|end|>{% endfor %}"
        "{{ messages[1].tool_calls[0].function.name }}",
        "{% for m in messages %}{{ m.content }}{% endfor %}",
    ],
    ids=["treats reasoning", "rewrites earlier messages", "refuses", "looks tools up", "has no close"],
)
def test_a_template_that_cannot_be_continued_for_sure_is_rendered_afresh(
    dense_model: Path, template: str
) -> None:
    renderer = template_renderer(load_tokenizer(dense_model), template)
    tail = [{"role": "tool", "content": "1", "tool_call_id": "c"}]
    assert renderer.bridge_to_next_turn([3], [80, END], tail) is None


def test_a_template_that_rewrites_earlier_messages_still_renders(dense_model: Path) -> None:
    renderer = template_renderer(load_tokenizer(dense_model), "{{ messages[-1].content }}<|end|>")
    rendered = renderer.render([message("user", "ab"), message("user", "c")], add_generation_prompt=True)
    assert rendered.token_ids == [74, END]


def test_tool_arguments_reach_the_template_as_objects(dense_model: Path) -> None:
    renderer = template_renderer(
        load_tokenizer(dense_model),
        "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.function.arguments.x }}{% endfor %}"
        "{% endfor %}",
    )
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"x": 7}'}}
    rendered = renderer.render([{"role": "assistant", "content": "", "tool_calls": [call]}])
    assert rendered.token_ids == load_tokenizer(dense_model).encode("7", add_special_tokens=False)


def test_many_threads_render_alike_over_a_few_tokenizers(dense_model: Path) -> None:
    pool = RendererPool(dense_model, max_renderers=3)
    start = threading.Barrier(8)

    def work(seed: int) -> bool:
        text = "".join(random.Random(seed).choices("abcdefgh ", k=400))
        expected = [ord(c) - 25 for c in text]
        start.wait(timeout=10)
        return all(pool.render([message("user", text)]).token_ids[1:401] == expected for _ in range(30))

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(work, range(8)))
    assert 1 <= len(pool) <= 3


def test_rendering_needs_no_torch_and_little_memory(dense_model: Path) -> None:
    code = (
        "import sys, psutil\n"
        "from moorage.engine.render import RendererPool\n"
        "from moorage.engine.generate import GenerateClient\n"
        "from moorage.engine.fleet import Fleet\n"
        f"RendererPool({str(dense_model)!r}).render([{{'role': 'user', 'content': 'abc'}}])\n"
        "print('torch' in sys.modules, psutil.Process().memory_info().rss >> 20)"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    torch_loaded, mib = printed.split()
    assert torch_loaded == "False"
    assert int(mib) < 200


def test_a_turn_costs_far_below_a_millisecond(pool: RendererPool) -> None:
    messages = [message("user", "Reverse: abcdefgh")]
    prompt = pool.render(messages).token_ids

    def turn() -> None:
        pool.render(messages)
        pool.parse([80, 81, 82, END], prompt_ids=prompt)

    turn()
    began = time.thread_time()
    for _ in range(200):
        turn()
    assert (time.thread_time() - began) / 200 < 1e-3  # measured 0.15 ms on an idle core


def test_bad_folders_and_names_are_refused_with_a_remedy(dense_model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no tokenizer\.json"):
        RendererPool(tmp_path)
    with pytest.raises(ConfigError, match=r"unknown renderer `qwen33` \(did you mean `qwen3`"):
        RendererPool(dense_model, "qwen33")
    (tmp_path / "config.json").write_text('{"vision_config": {"depth": 2}}')
    (tmp_path / "tokenizer.json").write_text((dense_model / "tokenizer.json").read_text())
    with pytest.raises(ConfigError, match="takes images"):
        RendererPool(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="no chat template"):
        RendererPool(tmp_path)


def test_a_folder_of_a_known_model_gets_that_models_renderer(dense_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "Qwen" / "Qwen3-0.6B"
    folder.mkdir(parents=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if (dense_model / name).exists():
            (folder / name).write_text((dense_model / name).read_text())
    with pytest.raises(Exception, match=r"While creating renderer 'qwen3'|<\|im_"):
        make_renderer(folder)  # the starter tokenizer lacks Qwen's markers, which that renderer insists on
    assert isinstance(make_renderer(folder, "default"), TemplateRenderer)
