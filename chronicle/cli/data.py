"""`chronicle data`: builds shards from text, verifies shards against their manifest, and shows what a run read."""

from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from chronicle.cli.options import IN_RUN, CommandResult, ExitCode, InRun, JsonOption, spread

app = typer.Typer(add_completion=False, rich_markup_mode=None, no_args_is_help=True,
                  help="Build, verify and account for training data.")


@app.command("build")
@spread
def build_shards(
    out: Path,
    corpus: list[str],
    shard_size: Annotated[int, Option("--shard-size", metavar="BYTES", min=16_384,
                                            help="Bytes of text in one tar.")] = 4_000_000,
    json: JsonOption = False,
) -> CommandResult:
    """Build WebDataset tar shards from text on this machine.

    Each source gets a manifest.

    Example: chronicle data build data --corpus code --corpus notes=~/notes

    Options:
      DIR: Directory for the built sources.
      --corpus [NAME=]CORPUS: code, reference, dict-gcide, python3-doc, or a folder of text (repeatable).
    """
    from chronicle.data.corpora import read_text
    from chronicle.data.shards import build_source

    lines, built = [], []
    for named in corpus:
        name, found, origin = named.rpartition("=")
        name = name if found else Path(origin).name
        manifest = build_source(out, name, read_text(str(Path(origin).expanduser()) if "/" in origin else origin),
                                origin=origin, shard_size_bytes=shard_size)
        size = sum(shard.text_bytes for shard in manifest.shards)
        lines.append(f"{name}: {size:,} bytes in {len(manifest.shards)} shards, sha256 {manifest.digest[:12]}")
        built.append(manifest.to_json())
    return CommandResult(lines=lines, data={"directory": str(out), "sources": built})


@app.command("index")
@spread
def index_shards(directories: list[str], out: Path = Path("data"), json: JsonOption = False) -> CommandResult:
    """Index shards as they are: tar (any member names), JSON lines, text.

    They may be remote. Nothing is copied or changed.
    `chronicle.data.PlanDataset` reads samples through the index in a planned order.

    Example: chronicle data index web=/shards/web code=/shards/code --out data

    Options:
      [NAME=]DIR...: Directories or URLs of shards, each a source.
      --out DIR: Where the indexes go, one file a source.
    """
    from chronicle.data.shard_index import (
        SUFFIX,
        describe_index,
        index_source,
        list_shards,
        named_directories,
        write_source_index,
    )

    places = named_directories(directories)
    found = {name: index_source(name, place) for name, place in places.items()}
    out.mkdir(parents=True, exist_ok=True)
    lines, told = [], []
    for name, index in found.items():
        path = out / f"{name}{SUFFIX}"
        write_source_index(index, path)
        lines.append(f"{describe_index(index)}: {path} ({path.stat().st_size:,} bytes)")
        others = list_shards(places[name])[1]
        if others:
            shown = ", ".join(f"`{other}`" for other in others[:3]) + (", …" if len(others) > 3 else "")
            lines.append(f"{name}: {len(others):,} other files are no shards and were left out: {shown}")
        told.append({"source": name, "index": str(path), "samples": index.num_samples, "shards": len(index.shards),
                     "digest": index.digest, "left_out": others})
    return CommandResult(lines=lines, data={"sources": told})


@app.command("verify")
@spread
def verify_shards(location: str, json: JsonOption = False) -> CommandResult:
    """Compare the shards with their index or manifest.

    It reports missing, truncated, changed and unlisted shards.

    Example: chronicle data verify data

    Options:
      PLACE: An index, a built source, or a directory with several.
    """
    from chronicle.data.shard_index import SUFFIX, read_source_index, verify_index
    from chronicle.data.shards import MANIFEST, verify_source
    from chronicle.errors import DataError

    root = Path(location)
    indexes = [root] if root.suffix == SUFFIX else sorted(root.glob(f"*{SUFFIX}")) if root.is_dir() else []
    many = "://" not in location and not (root / MANIFEST).is_file()
    sources = sorted(str(path.parent) for path in root.glob(f"*/{MANIFEST}")) if many else [location]
    well = "all shards as indexed" if indexes else "as its manifest says"
    if indexes:
        found = {str(path): list(verify_index(read_source_index(path))) for path in indexes}
    else:
        found = {source: list(verify_source(source)) for source in sources}
    if not found:
        raise DataError(f"`{location}` holds no built source: {MANIFEST} is missing", "build it with `chronicle data build`")
    lines = [line for source, problems in found.items() for line in problems or [f"{source}: {well}"]]
    code = ExitCode.FINDINGS if any(found.values()) else ExitCode.DONE
    return CommandResult(lines=lines, data={"sources": found}, exit_code=code)


@app.command("usage")
@spread
def usage(at: InRun = IN_RUN) -> CommandResult:
    """Show the data that the lineage read.

    It shows repeats and skips of each restart, and unseen data. With `chronicle.data.observe` it shows samples, repeats
    and shares of each launch.

    Example: chronicle data usage --run demo
    """
    from chronicle.data.observe import read_accounts
    from chronicle.data.usage import has_plan, read_readings, restart_lines, source_use

    paths = at.settings().paths
    accounts = read_accounts(paths.observed_dir)
    if accounts and not has_plan(paths):
        return CommandResult(lines="\n".join(account.text() for account in accounts), data={
            "observed": [{"launch": account.launch, **account.to_json()} for account in accounts]})
    plan, readings = read_readings(paths)
    restarts, sources = restart_lines(plan, readings), source_use(plan, readings)
    lines = [line.text() for line in restarts] or ["no restart"]
    lines += [f"{use.name}: {use.drawn:,} windows read of {use.num_samples:,} ({use.epochs:.2f} epochs), "
              f"{use.repeats:,} repeats, {use.unseen_fraction:.1%} unseen" for use in sources]
    names = ("name", "num_samples", "drawn", "repeats", "epochs", "unseen_fraction")
    used = [{name: getattr(use, name) for name in names} for use in sources]
    data = {"plan_hash": plan.plan_hash, "restarts": [line.to_json() for line in restarts], "sources": used}
    return CommandResult(lines=lines, data=data)
