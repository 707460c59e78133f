"""Chat templates: what a tool result adds is found by difference, in any template."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from motley_sampler.rollout.language import BASH_TOOL, SYSTEM_PROMPT, LanguageError, load_language

END = 2
# As Qwen3 does: tools in the system message, thinking of earlier turns stripped, tool results as the user's words.
QWEN3 = """\
{%- if tools %}
{{- '<|im_start|>system\\n' + messages[0].content + '\\n<tools>\\n' }}
{%- for tool in tools %}{{- tool | tojson + '\\n' }}{%- endfor %}
{{- '</tools><|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'user' %}
{{- '<|im_start|>user\\n' + message.content + '<|im_end|>\\n' }}
{%- elif message.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' + message.content.split('</think>')[-1].lstrip('\\n') + '<|im_end|>\\n' }}
{%- elif message.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n<think>\\n' }}{%- endif %}
"""


@pytest.fixture
def qwen(model: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "qwen"
    shutil.copytree(model, folder)
    (folder / "chat_template.jinja").write_text(QWEN3)
    return folder


def test_a_template_that_takes_tools_is_told_of_bash(qwen: Path) -> None:
    language = load_language(qwen)
    text = language.tokenizer.decode(language.opening("Do it.\n"), skip_special_tokens=False)
    want_system = f"<|im_start|>system\n{SYSTEM_PROMPT}\n<tools>\n{json.dumps(BASH_TOOL)}\n</tools><|im_end|>\n"
    assert text == f"{want_system}<|im_start|>user\nDo it.<|im_end|>\n<|im_start|>assistant\n<think>\n"


def test_a_tool_result_follows_the_reply_as_the_template_says(qwen: Path) -> None:
    language = load_language(qwen)

    def added(last: int) -> str:
        return str(language.tokenizer.decode(language.after_reply([50, last], "out"), skip_special_tokens=False))

    want = "\n<|im_start|>user\n<tool_response>\nout\n</tool_response><|im_end|>\n<|im_start|>assistant\n<think>\n"
    assert added(END) == want
    assert added(51) == "<|im_end|>" + want  # a reply that was cut is closed first


def test_the_demo_models_transcripts_have_no_newline_between_messages() -> None:
    folder = Path(__file__).parents[2] / "examples" / "demo" / "model"
    language = load_language(folder)
    end = language.tokenizer.token_to_id("<|im_end|>")
    added = language.tokenizer.decode(language.after_reply([7, end], "ok"), skip_special_tokens=False)
    assert added == "<|im_start|>tool\nok<|im_end|><|im_start|>assistant\n"
    assert not language.takes_tools


def test_thinking_before_a_reply_is_kept_token_for_token(qwen: Path) -> None:
    """The template would strip it from earlier turns; recorded tokens are never rendered again."""
    language = load_language(qwen)
    reply = language.tokenizer.encode("so...\n</think>\n\nls", add_special_tokens=False).ids
    assert language.decode([*reply, END]) == "so...\n</think>\n\nls"


@pytest.mark.parametrize(
    ("spoil", "want"),
    [
        (lambda folder: (folder / "tokenizer.json").unlink(), "tokenizer.json: is missing"),
        (lambda folder: (folder / "tokenizer_config.json").write_text("{}"), "neither chat_template.jinja nor"),
    ],
)
def test_an_unusable_model_folder_is_named(model: Path, tmp_path: Path, spoil: Any, want: str) -> None:
    folder = tmp_path / "bad"
    shutil.copytree(model, folder)
    spoil(folder)
    with pytest.raises(LanguageError, match=want):
        load_language(folder)


def test_a_template_that_hides_replies_cannot_be_continued(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "bad"
    shutil.copytree(model, folder)
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    with pytest.raises(LanguageError, match="cannot be continued"):
        load_language(folder).after_reply([3], "out")


def test_a_template_cannot_reach_into_python(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "bad"
    shutil.copytree(model, folder)
    (folder / "chat_template.jinja").write_text("{{ messages.__class__.__mro__ }}")
    with pytest.raises(LanguageError):
        load_language(folder).opening("x")
