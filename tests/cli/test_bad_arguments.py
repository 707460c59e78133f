"""Whatever a person hands to `motley plan`, `replay` or `watch`: one line that names what is wrong, and a non-zero exit."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from motley_operator import follow, preview, replaying
from motley_operator.kube import NoClusterError, load_credentials

ROOT = Path(__file__).parents[2]
STUDY = ROOT / "examples/study/run.yaml"
LEDGER = ROOT / "tests/planner/ledgers/stable.jsonl"

# (what is in the file, words of the message)
NOT_MANIFESTS = {
    "nothing": (b"", ["exactly one RLRun", "found 0"]),
    "broken YAML": (b"hello: [\n", ["not YAML"]),
    "bytes": (b"\xff\xfe\x00\x81", ["not a text file"]),
    "words": (b"just words\n", ["document 1", "must be an object", "text"]),
    "a number": (b"42\n", ["document 1", "must be an object", "42"]),
    "a list": (b"- a\n- b\n", ["document 1", "must be an object", "a list"]),
    "a group alone": (
        b"{kind: SamplerGroup, metadata: {name: g}, spec: {runRef: {name: r}}}\n",
        ["exactly one RLRun", "found 0"],
    ),
    "a run without spec": (
        b"{kind: RLRun, metadata: {name: r}}\n",
        ["document 1", "spec must be an object", "nothing"],
    ),
    "a run without name": (b"{kind: RLRun, metadata: {}, spec: {}}\n", ["metadata.name of RLRun"]),
    "a run whose metadata is text": (b"{kind: RLRun, metadata: r, spec: {}}\n", ["metadata must be an object", "text"]),
}


def the_only_line(capsys: pytest.CaptureFixture[str]) -> str:
    seen = capsys.readouterr()
    assert seen.out == ""
    (line,) = seen.err.splitlines()
    return line


@pytest.mark.parametrize("case", NOT_MANIFESTS)
def test_plan_names_in_one_line_what_is_no_manifest(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, want_words = NOT_MANIFESTS[case]
    file = tmp_path / "run.yaml"
    file.write_bytes(text)
    assert preview.main(str(file), "table", offline=True) == 1
    line = the_only_line(capsys)
    assert line.startswith("motley plan: ")
    for word in want_words:
        assert word in line


@pytest.mark.parametrize("case", ["broken YAML", "bytes", "a list"])
def test_replay_says_the_same_of_its_manifest(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, want_words = NOT_MANIFESTS[case]
    file = tmp_path / "run.yaml"
    file.write_bytes(text)
    assert replaying.main(str(LEDGER), str(file), "table") == 1
    line = the_only_line(capsys)
    for word in want_words:
        assert word in line


def test_a_manifest_that_is_not_there_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert preview.main(str(tmp_path / "none.yaml"), "table", offline=True) == 1
    assert the_only_line(capsys) == f"motley plan: {tmp_path}/none.yaml: No such file or directory"


@pytest.mark.parametrize(
    "text", [None, "", "- a\n", "hello: [\n", "{clusters: 3, current-context: x, contexts: [3]}\n"]
)
def test_a_kubeconfig_that_was_named_and_is_none_is_an_error_and_no_plan(
    text: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "kubeconfig"
    if text is not None:
        path.write_text(text)
    monkeypatch.setenv("KUBECONFIG", str(path))
    with pytest.raises(NoClusterError, match="kubeconfig"):
        load_credentials()
    assert asyncio.run(follow.main("r", "", 1.0, True)) == 1
    assert "kubeconfig" in the_only_line(capsys)
    assert preview.main(str(STUDY), "table") == 1
    line = the_only_line(capsys)
    assert "the cluster cannot be looked at" in line
    assert "--offline" in line


def test_a_fleet_without_prices_costs_what_is_not_known_and_not_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(STUDY.read_text().replace("  prices:", "  unread:"))
    assert preview.main(str(file), "table", offline=True) == 0
    shown = capsys.readouterr().out
    assert "declared: $unknown/h, 1376 sessions, $unknown per 1,000 turns" in shown
    assert "$0.00" not in shown
