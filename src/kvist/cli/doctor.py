"""``kvist doctor``: why something does not work, or does not help, on the engine's side or before a daemon's start.

Exit codes: 0 nothing worse than a note, 1 warnings or problems, 2 wrong arguments.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.text import Text

from kvist.cli.asking import Json, silenced
from kvist.cli.flags import ConfigFile, with_flags
from kvist.cli.output import output, print_error, print_json
from kvist.doctor.examination import Questions, examine, look
from kvist.doctor.facts import NotKnown
from kvist.doctor.findings import Finding, Level, is_clean
from kvist.errors import ConfigError
from kvist.server.config import ServeConfig, load_config, process_environment

EPILOG: Final = "Example: kvist doctor --vllm 'Qwen/Qwen3-8B --kv-transfer-config {...}'"
_MARKS: Final = {
    Level.OK: ("✔", "green"),
    Level.NOTE: ("·", "cyan"),
    Level.WARNING: ("!", "yellow"),
    Level.PROBLEM: ("✖", "red"),
}


@with_flags
def command(  # noqa: PLR0913 -- an argument is an option
    flags: Mapping[str, Any],
    config: ConfigFile = None,
    vllm: Annotated[str | None, typer.Option(help="What follows 'vllm serve', as one text.", metavar="ARGS")] = None,
    vllm_config: Annotated[
        str | None, typer.Option(help="The value of vLLM's --kv-transfer-config.", metavar="JSON")
    ] = None,
    gpu: Annotated[bool, typer.Option(help="Look at GPUs, and try to share their memory.")] = True,
    serve: Annotated[
        bool, typer.Option("--serve", help="Look at a daemon that is to be started, with these options of kvist serve.")
    ] = False,
    json: Json = False,
) -> None:
    """Find out why something does not work, or does not help."""
    given = [name for name in (*flags, *(["config"] if config is not None else [])) if name not in ("socket", "disk")]
    try:
        if given and not serve:
            raise ConfigError(f"--{given[0].replace('_', '-')} says how to serve; add --serve")
        if vllm is not None and vllm_config is not None:
            raise ConfigError(f"--vllm {vllm!r} and --vllm-config {vllm_config!r} say the same; give one of them")
        planned = _read_config(config, flags) if serve else None
        questions = Questions(
            flags.get("socket"), tuple(flags.get("disk", ())), vllm, vllm_config, planned, has_gpus=gpu
        )
        with silenced():
            facts = look(questions, process_environment())
    except ConfigError as error:
        print_error(error)
        raise typer.Exit(2) from None
    findings = examine(facts)
    if json:
        print_json({"findings": findings, "facts": facts})
    else:
        _print_findings(findings)
    if not is_clean(findings):
        raise typer.Exit(1)


def _read_config(file: Path | None, flags: Mapping[str, Any]) -> ServeConfig | NotKnown:
    try:
        return load_config(file, flags, process_environment())
    except ConfigError as error:
        return NotKnown(str(error))


def _print_findings(findings: Sequence[Finding]) -> None:
    """Print topic by topic, in the order of the checks."""
    for topic in dict.fromkeys(_topic(finding) for finding in findings):
        output.print(Text(topic, style="bold"))
        for finding in findings:
            if _topic(finding) == topic:
                _print_finding(finding)
    num = {level: sum(finding.level is level for finding in findings) for level in Level}
    output.print(f"{num[Level.PROBLEM]} problems, {num[Level.WARNING]} warnings, {num[Level.NOTE]} notes")


def _print_finding(finding: Finding) -> None:
    mark, style = _MARKS[finding.level]
    line = Text(f"  {mark} ", style=style)
    line.append(finding.what if finding.level is Level.OK else f"{finding.code}: {finding.what}", style="default")
    output.print(line, soft_wrap=True)
    if finding.level is not Level.OK:
        output.print(Text(f"    {finding.why}"), soft_wrap=True)
        output.print(Text(f"    change: {finding.change}", style="bold"), soft_wrap=True)


def _topic(finding: Finding) -> str:
    return finding.code.partition(".")[0]
