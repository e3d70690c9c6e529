"""The shards of a run that was spread over several folders, put together in the run's own."""

from identikit.errors import InputError
from identikit.runs.inspect import RunState, absent_parts, listed, parts_of, state
from identikit.runs.manifest import NotedCommand, noted_command
from identikit.runs.run import PART, shard_files
from identikit.runs.store import Store, unequal

_MERGED_HERE = {"shard": None, "engine": "local", "workers": None, "address": None, "gpus": 0.0}


def merge(folder: str) -> NotedCommand:
    """Copy what the shards in a folder hold into the folder itself, and return the command that makes the tables.

    Shards that are missing, not complete, damaged or of different runs are refused. Stopped at any moment, it can be
    run again.
    """
    there = parts_of(folder)
    counts = sorted({count for _, count in there})
    if not there:
        raise InputError(f"Cannot merge {folder}: it holds no shards. Give the --out folder of its shards.")
    if len(counts) > 1:
        raise InputError(
            f"Cannot merge {folder}: it holds shards of different divisions, into {' and '.join(map(str, counts))}. "
            "Remove the ones that you do not want."
        )
    if missing := absent_parts(there):
        raise InputError(
            f"Cannot merge {folder}: {listed(missing)} of {counts[0]} shards {'is' if len(missing) == 1 else 'are'} "
            "missing. Compute what is missing with --shard, or copy it there."
        )
    parts = {f"{index}/{count}": state(place) for (index, count), place in there.items()}
    first = parts[f"1/{counts[0]}"]
    for shard, part in parts.items():
        if why := _flaw(shard, part, first):
            raise InputError(f"Cannot merge {folder}: {why}")
    settings = {name: value for name, value in first.settings.items() if name not in ("shard", "device")}
    recorded = first.recorded | {"shards": {shard: part.recorded for shard, part in parts.items()}}
    command = noted_command(first.folder)
    _copy(Store(folder, settings, recorded), list(parts.values()))
    return command._replace(arguments=command.arguments | _MERGED_HERE)


def _flaw(shard: str, part: RunState, first: RunState) -> str | None:
    """Say why a shard cannot be merged with the first one."""
    if part.writer is not None:
        return f"{part.writer.words()} is writing to {part.folder}. Wait for it to finish."
    for file, why in part.damaged.items():
        return f"{part.folder}/{file} is damaged ({why}). `identikit resume {part.folder}` will compute it again."
    if not part.complete:
        return f"{part.folder} is not complete. Continue with `identikit resume {part.folder}`."
    if part.settings.get("shard") != shard:
        return f"{part.folder} holds shard {part.settings.get('shard')}. Rename it, or compute its own shard."
    for key, (value, other) in unequal(first.settings, part.settings).items():
        if key != "shard":
            return (
                f"its shards belong to different runs; {key} is {value!r} in {first.folder}, and {other!r} in "
                f"{part.folder}. Compute all with the same settings."
            )
    return None


def _copy(store: Store, parts: list[RunState]) -> None:
    """Copy the results of the shards into the run's folder; no text and no part may be there twice."""
    sources: dict[str, Store] = {}
    done: dict[int | str, str] = {}
    for part in parts:
        for piece in part.done:
            if piece in done:
                raise InputError(
                    f"Cannot merge {store.folder}: {part.unit.removesuffix('s')} {piece} is both in {done[piece]} and "
                    f"in {part.folder}. Compute the shards again."
                )
            done[piece] = part.folder
        source = Store(part.folder, part.settings)
        sources |= dict.fromkeys(_results(source), source)
    if strange := [name for name in _results(store) if name not in sources]:
        raise InputError(
            f"Cannot merge {store.folder}: it already holds results of its own, such as {strange[0]}. Resume that run "
            "instead, or merge the shards in another folder."
        )
    with store.held():
        for name, source in sources.items():
            content = source.read(name)
            if not store.has(name) or store.read(name) != content:
                store.write(name, content)


def _results(store: Store) -> list[str]:
    names = store.names()
    return [*shard_files(names), *(name for name in names if name.startswith(PART) and name.endswith(".json"))]
