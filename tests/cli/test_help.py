"""`motley COMMAND --help` tells what a command is for, and starts nothing."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from motley_api import cli


@dataclass(frozen=True)
class Point:
    """An entry point that is loaded without being installed."""

    name: str
    command: Callable[[], None]

    def load(self) -> Callable[[], None]:
        return self.command


@pytest.mark.parametrize("name", cli.SERVICES)
@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_of_a_pods_process_describes_it_and_does_not_start_it(
    name: str, flag: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = types.ModuleType("some_service", f"`motley {name}`: one process.")

    def main() -> None:
        raise AssertionError("started")

    main.__module__ = module.__name__
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(cli, "commands", lambda: {name: Point(name, main)})
    cli.main([name, flag])
    shown = capsys.readouterr().out
    assert shown.startswith(f"`motley {name}`: one process.")
    assert "environment" in shown


def test_an_unknown_command_is_one_line_and_exit_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["nosuch"])
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "no command 'nosuch'" in line
