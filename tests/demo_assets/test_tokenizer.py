"""The tokenizer round-trips every text, and a transcript's tokens grow only at their end."""

import random
from itertools import batched
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from motley_sampler.rollout.language import load_language
from transformers import AutoTokenizer
from warmstart import demonstrator, families, tokens, words
from warmstart.rollout import Language

MODEL = Path(__file__).resolve().parents[2] / "examples" / "demo" / "model"
LANGUAGE = Language(tokens.load(MODEL))
HF = AutoTokenizer.from_pretrained(MODEL)
EXACT = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}


def episodes(count: int) -> list[demonstrator.Episode]:
    rng = random.Random(3)
    habits = demonstrator.Habits(peek=0.5, untagged=0.2)
    return [
        demonstrator.demonstrate(families.make(family, rng), rng, habits)
        for family in families.FAMILIES
        for _ in range(count)
    ]


def test_committed_tokenizer_is_what_the_script_builds() -> None:
    assert LANGUAGE.tokenizer.to_str() == tokens.build().to_str()


def test_every_command_decodes_to_its_exact_text() -> None:
    for episode in episodes(20):
        for _, content in episode.messages:
            assert LANGUAGE.decode(LANGUAGE.encode(content)) == content
            assert HF.decode(HF.encode(content, add_special_tokens=False), **EXACT) == content


@settings(max_examples=200, deadline=None)
@given(st.lists(st.one_of(st.text(max_size=12), st.sampled_from([*tokens.pieces(), *words.SPECIALS])), max_size=8))
def test_any_text_round_trips(parts: list[str]) -> None:
    text = "".join(parts)
    assert LANGUAGE.decode(LANGUAGE.encode(text)) == text


def test_demonstrations_are_whole_words() -> None:
    """Single characters stand only for digits, punctuation, space and newline: no word is spelled out."""
    for episode in episodes(20):
        for _, content in episode.messages:
            singles = {LANGUAGE.decode([token]) for token in LANGUAGE.encode(content)} - set(tokens.pieces())
            assert singles - set(words.SPECIALS) <= set("0123456789./*'\" =\n"), content


@pytest.mark.parametrize(
    ("text", "want_tokens"),
    [
        ("ok", 1),
        ("exit 1", 2),
        ("error: no tool call", 2),
        ("<tool_call>submit</tool_call>", 3),
        # tags 2, "sed " "-i " "s/" 3, digits 4, "/" and "/ " 2, path "src/" "limit" ".py" 3
        ("<tool_call>sed -i s/12/37/ src/limit.py</tool_call>", 14),
        # "cat: ", "conf/", "port", ": No such file or directory"
        ("cat: conf/port: No such file or directory", 4),
    ],
)
def test_common_texts_are_short(text: str, want_tokens: int) -> None:
    assert len(LANGUAGE.encode(text)) == want_tokens


def test_template_renders_what_the_warm_start_saw() -> None:
    for episode in episodes(3):
        for length in range(1, len(episode.messages) + 1):
            messages = [{"role": role, "content": content} for role, content in episode.messages[:length]]
            ask = episode.messages[length - 1][0] != "assistant"
            got = HF.apply_chat_template(messages, tokenize=False, add_generation_prompt=ask)
            assert got == tokens.render(episode.messages[:length], reply_next=ask)


def test_transcript_grows_only_at_its_end_token_for_token() -> None:
    for episode in episodes(3):
        messages = [{"role": role, "content": content} for role, content in episode.messages]
        whole = HF.apply_chat_template(messages, tokenize=True, return_dict=False)
        for length in range(1, len(messages) + 1):
            ask = messages[length - 1]["role"] != "assistant" and length < len(messages)
            part = HF.apply_chat_template(
                messages[:length], tokenize=True, return_dict=False, add_generation_prompt=ask
            )
            assert whole[: len(part)] == part


def test_reply_with_its_end_token_meets_the_next_message() -> None:
    """prompt + reply + <|im_end|> + next message equals the whole rendered at once: nothing is between them."""
    before = [{"role": "user", "content": "Delete the file named in conf/key."}]
    reply = "<tool_call>cat conf/key</tool_call>"
    after = [*before, {"role": "assistant", "content": reply}, {"role": "tool", "content": "tmp/list\n"}]
    prompt = HF.apply_chat_template(before, tokenize=True, return_dict=False, add_generation_prompt=True)
    generated = [*LANGUAGE.encode(reply), LANGUAGE.end]
    tail = LANGUAGE.message("tool", "tmp/list") + LANGUAGE.reply_header
    assert HF.apply_chat_template(after, tokenize=True, return_dict=False, add_generation_prompt=True) == [
        *prompt,
        *generated,
        *tail,
    ]


def test_end_of_reply_is_the_stop_token() -> None:
    assert HF.eos_token == "<|im_end|>"
    assert HF.eos_token_id == LANGUAGE.end


def test_tool_call_tags_survive_a_decoder_that_skips_special_tokens() -> None:
    ids = [*LANGUAGE.encode("<tool_call>submit</tool_call>"), LANGUAGE.end]
    assert HF.decode(ids, skip_special_tokens=True) == "<tool_call>submit</tool_call>"


def test_rollout_workers_build_the_same_tokens_as_the_warm_start() -> None:
    worker = load_language(MODEL)
    for episode in episodes(3):
        (_, instruction), *rest = episode.messages
        ids = worker.opening(instruction + "\n")
        for (_, reply), (_, result) in batched(rest[:-1], 2):  # all but the last: submit has no answer
            reply_ids = [*LANGUAGE.encode(reply), LANGUAGE.end]
            assert worker.decode(reply_ids) == reply
            ids += [*reply_ids, *worker.after_reply(reply_ids, result)]
        assert ids == LANGUAGE.encode(tokens.render(episode.messages[:-1], reply_next=True))
