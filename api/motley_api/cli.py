"""The `motley` command: its subcommands come from whichever parts are installed, through the entry points `motley.commands`.

Only the subcommand that is called gets imported, so that `motley rollout` never loads torch.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points

GROUP = "motley.commands"
HELP = {
    "crds": "write the CustomResourceDefinitions",
    "local": "a real control plane with virtual GPU nodes on this machine",
    "operator": "the Kubernetes operator",
    "plan": "what would be placed, shared and paid for a manifest, and why",
    "replay": "run planner and guard over a recorded ledger",
    "rollout": "a rollout worker: agent sessions in sandboxes",
    "router": "places sessions on engines",
    "sampler": "an engine behind its agent",
    "tasks": "check and audit task folders",
    "trainer": "the training gang's process",
    "watch": "a run, live in the terminal",
}
# Processes of a run's pods: configured by their environment alone.
SERVICES = ("rollout", "router", "sampler", "trainer")


def commands() -> dict[str, EntryPoint]:
    return {point.name: point for point in sorted(entry_points(group=GROUP), key=lambda point: point.name)}


def usage(found: dict[str, EntryPoint]) -> str:
    rows = "\n".join(f"  {name:<10} {HELP.get(name, '')}" for name in found)
    return f"usage: motley COMMAND [OPTION ...]\n\nCommands (motley COMMAND --help tells more):\n{rows}\n"


def main(arguments: list[str] | None = None) -> None:
    argv = sys.argv[1:] if arguments is None else arguments
    found = commands()
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(usage(found), end="")
        return
    if argv[0] == "--version":
        from importlib.metadata import version

        print(f"motley {version('motley')}")
        return
    if argv[0] not in found:
        print(f"motley: no command {argv[0]!r}; there are: {', '.join(found)}", file=sys.stderr)
        sys.exit(2)
    command: Callable[[], object] = found[argv[0]].load()
    if argv[0] in SERVICES and any(argument in ("-h", "--help") for argument in argv[1:]):
        print(inspect.getdoc(sys.modules[command.__module__]))
        print("\nTakes no options. The operator starts it in a pod and sets its environment (MOTLEY_*).")
        return
    sys.argv = [f"motley {argv[0]}", *argv[1:]]
    command()


if __name__ == "__main__":
    main()
