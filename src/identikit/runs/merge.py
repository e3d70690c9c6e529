"""Merge the portions of a run that was spread over several folders into the folder of the run."""

from identikit.errors import InputError
from identikit.runs.inspect import RunState, list_briefly, missing_portions, portion_folders, state
from identikit.runs.manifest import NotedCommand, noted_command
from identikit.runs.run import PART, shard_files
from identikit.runs.store import Store, differing

_LOCAL_ARGUMENTS = {"shard": None, "engine": "local", "workers": None, "address": None, "gpus": 0.0}


def merge(folder: str) -> NotedCommand:
    """Copy the results of all portions in a folder into the folder itself; return the command that makes the tables.

    A portion, `--shard i/n` to users, is refused if it is missing, incomplete, damaged or of another run. A merge that
    was stopped can be run again.
    """
    folders = portion_folders(folder)
    counts = sorted({count for _, count in folders})
    if not folders:
        raise InputError(f"Cannot merge {folder}: it holds no shards. Give the --out folder of its shards.")
    if len(counts) > 1:
        raise InputError(
            f"Cannot merge {folder}: it holds shards of different divisions, into {' and '.join(map(str, counts))}. "
            "Remove the ones that you do not want."
        )
    if missing := missing_portions(folders):
        verb = "is" if len(missing) == 1 else "are"
        raise InputError(
            f"Cannot merge {folder}: {list_briefly(missing)} of {counts[0]} shards {verb} missing. "
            "Compute what is missing with --shard, or copy it there."
        )
    portions = {f"{index}/{count}": state(path) for (index, count), path in folders.items()}
    first = portions[f"1/{counts[0]}"]
    for shard, portion in portions.items():
        if obstacle := _obstacle(shard, portion, first):
            raise InputError(f"Cannot merge {folder}: {obstacle}")
    settings = {name: value for name, value in first.settings.items() if name not in ("shard", "device")}
    recorded = first.recorded | {"shards": {shard: portion.recorded for shard, portion in portions.items()}}
    command = noted_command(first.folder)
    _copy_results(list(portions.values()), Store(folder, settings, recorded))
    return command._replace(arguments=command.arguments | _LOCAL_ARGUMENTS)


def _obstacle(shard: str, portion: RunState, first: RunState) -> str | None:
    """Return why a portion cannot be merged with the first one; None if it can."""
    folder = portion.folder
    if portion.writer is not None:
        return f"{portion.writer.words()} is writing to {folder}. Wait for it to finish."
    for file, reason in portion.damaged.items():
        return f"{folder}/{file} is damaged ({reason}). `identikit resume {folder}` will compute it again."
    if not portion.complete:
        return f"{folder} is not complete. Continue with `identikit resume {folder}`."
    if portion.settings.get("shard") != shard:
        return f"{folder} holds shard {portion.settings.get('shard')}. Rename it, or compute its own shard."
    for key, (value, other) in differing(first.settings, portion.settings).items():
        if key != "shard":
            return (
                f"its shards belong to different runs; {key} is {value!r} in {first.folder}, and {other!r} in "
                f"{folder}. Compute all with the same settings."
            )
    return None


def _copy_results(portions: list[RunState], store: Store) -> None:
    """Copy the results of portions into the run's folder; no text and no part may be in two of them."""
    sources: dict[str, Store] = {}
    folder_of: dict[int | str, str] = {}
    for portion in portions:
        for piece in portion.done:
            if piece in folder_of:
                raise InputError(
                    f"Cannot merge {store.folder}: {portion.unit.removesuffix('s')} {piece} is both in "
                    f"{folder_of[piece]} and in {portion.folder}. Compute the shards again."
                )
            folder_of[piece] = portion.folder
        source = Store(portion.folder, portion.settings)
        sources |= dict.fromkeys(_result_files(source), source)
    if unknown := [name for name in _result_files(store) if name not in sources]:
        raise InputError(
            f"Cannot merge {store.folder}: it already holds results of its own, such as {unknown[0]}. Resume that run "
            "instead, or merge the shards in another folder."
        )
    with store.held():
        for name, source in sources.items():
            content = source.read(name)
            if not store.has(name) or store.read(name) != content:
                store.write(name, content)


def _result_files(store: Store) -> list[str]:
    names = store.names()
    return [*shard_files(names), *(name for name in names if name.startswith(PART) and name.endswith(".json"))]
