"""The shards of a run that was spread over several folders, put together in the run's own."""

from collections.abc import Mapping

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
    parts = [state(part) for part in _all_parts(folder)]
    for part in parts:
        _check_complete(folder, part)
        _check_same(folder, parts[0], part)
    settings = {name: value for name, value in parts[0].settings.items() if name not in ("shard", "device")}
    recorded = parts[0].recorded | {"shards": {str(part.settings["shard"]): part.recorded for part in parts}}
    command = noted_command(parts[0].folder)
    _copy(Store(folder, settings, recorded), _sources(folder, parts))
    return command._replace(arguments=command.arguments | _MERGED_HERE)


def _all_parts(folder: str) -> list[str]:
    parts = parts_of(folder)
    if not parts:
        raise InputError(f"Cannot merge {folder}: it holds no shards. Give the --out folder of its shards.")
    counts = sorted({count for _, count in parts})
    if len(counts) > 1:
        raise InputError(
            f"Cannot merge {folder}: it holds shards of different divisions, into {' and '.join(map(str, counts))}. "
            "Remove the ones that you do not want."
        )
    if missing := absent_parts(parts):
        raise InputError(
            f"Cannot merge {folder}: {listed(missing)} of {counts[0]} shards {'is' if len(missing) == 1 else 'are'} "
            "missing. Compute what is missing with --shard, or copy it there."
        )
    return list(parts.values())


def _check_complete(folder: str, part: RunState) -> None:
    if part.writer is not None:
        raise InputError(
            f"Cannot merge {folder}: {part.writer.words()} is writing to {part.folder}. Wait for it to finish."
        )
    for file, why in part.damaged.items():
        raise InputError(
            f"Cannot merge {folder}: {part.folder}/{file} is damaged ({why}). `identikit resume {part.folder}` "
            "will compute it again."
        )
    if not part.complete:
        raise InputError(
            f"Cannot merge {folder}: {part.folder} is not complete. Continue with `identikit resume {part.folder}`."
        )


def _check_same(folder: str, first: RunState, part: RunState) -> None:
    _, index, _, count = part.folder.rpartition("/")[2].split("-")
    if part.settings.get("shard") != f"{int(index)}/{int(count)}":
        raise InputError(
            f"Cannot merge {folder}: {part.folder} holds shard {part.settings.get('shard')}. Rename it, or compute its "
            "own shard."
        )
    for key, (value, other) in unequal(first.settings, part.settings).items():
        if key != "shard":
            raise InputError(
                f"Cannot merge {folder}: its shards are of different runs; {key} is {value!r} in {first.folder}, and "
                f"{other!r} in {part.folder}. Compute all with the same settings."
            )


def _sources(folder: str, parts: list[RunState]) -> dict[str, Store]:
    """Return the files to copy, each with its shard; no text and no part is there twice."""
    sources: dict[str, Store] = {}
    done: dict[int | str, str] = {}
    for part in parts:
        for piece in part.done:
            if piece in done:
                raise InputError(
                    f"Cannot merge {folder}: {part.unit.removesuffix('s')} {piece} is both in {done[piece]} and in "
                    f"{part.folder}. Compute the shards again."
                )
            done[piece] = part.folder
        store = Store(part.folder, part.settings)
        sources |= dict.fromkeys(_results(store), store)
    return sources


def _results(store: Store) -> list[str]:
    names = store.names()
    return [*shard_files(names), *(name for name in names if name.startswith(PART) and name.endswith(".json"))]


def _copy(store: Store, sources: Mapping[str, Store]) -> None:
    if strange := [name for name in _results(store) if name not in sources]:
        raise InputError(
            f"Cannot merge {store.folder}: it already holds results of its own, such as {strange[0]}. Resume that run "
            "instead, or merge the shards in another folder."
        )
    with store:
        for name, source in sources.items():
            content = source.read(name)
            if not store.has(name) or store.read(name) != content:
                store.write(name, content)
