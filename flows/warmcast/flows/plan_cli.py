"""The command ``warmcast plan``, as a function for typer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from warmcast.flows.cli import OriginUrl, Seconds, check_origin, deadline_of, ended_by_sigterm
from warmcast.flows.errors import DeployError
from warmcast.flows.progress import nbytes_text
from warmcast.manifests.errors import WarmcastError

CONFIG = "warmcast.yaml"


def plan(
    models: Annotated[
        list[str] | None, typer.Argument(help="Models of the file; all without.")
    ] = None,
    file: Annotated[
        Path, typer.Option("--file", "-f", help="The file that names the models.")
    ] = Path(CONFIG),
    origin: OriginUrl = "",
    schema: Annotated[
        bool, typer.Option("--schema", help="Print the file's JSON schema, for editors.")
    ] = False,
    deadline: Seconds = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the plan to this file.")
    ] = None,
) -> None:
    """Show what `warmcast deploy -f` would do; change nothing."""
    from warmcast.flows.config import ConfigFile, read_config

    if schema:
        print(json.dumps(ConfigFile.model_json_schema(), indent=2))
        return
    from warmcast.flows.plan import ModelPlan, plan_job

    config = read_config(file)
    url = origin or config.origin or ""
    check_origin(url)
    limit = deadline_of(deadline)
    done: dict[str, ModelPlan] = {}
    failed: dict[str, str] = {}
    with ended_by_sigterm():
        for name, job in config.chosen(models or []).items():
            print(name)
            try:
                done[name] = plan_job(job, url, limit)
                print("\n".join(done[name].lines()))
            except WarmcastError as cause:
                failed[name] = str(cause)
                print(f"  failed   {cause}")
    moving = sum(p.moving_nbytes for p in done.values())
    perhaps = sum(p.perhaps_nbytes for p in done.values())
    changing = sum(p.changes for p in done.values())
    summary = (
        f"{changing} of {len(done) + len(failed)} models would change, "
        f"{nbytes_text(moving)} to move"
        + (f" and perhaps {nbytes_text(perhaps)}" if perhaps else "")
        + (f", {len(failed)} failed" if failed else "")
    )
    print(summary)
    if json_file is not None:
        record: dict[str, Any] = {
            "origin": url,
            "models": {name: p.record() for name, p in done.items()},
            "failed": failed,
            "summary": summary,
        }
        json_file.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    if failed:
        raise DeployError("plan", expected="models that can be deployed", found=", ".join(failed))
