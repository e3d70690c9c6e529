"""Folders of results on the Hugging Face hub: uploaded as a dataset, with a card that says what they hold."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from identikit.checks import flag, shortened
from identikit.errors import InputError

if TYPE_CHECKING:
    from identikit.results.result import Result

CARD = "README.md"


def push_result(result: "Result", repo: str, *, public: bool) -> str:
    """Upload a result with its card; return the address."""
    public = flag("public", public)
    check_repo(repo)
    with TemporaryDirectory() as temporary:
        folder = Path(temporary, "result")
        result.save(folder)
        return upload(folder, repo, result_card(repo, result), public=public)


def check_repo(repo: object) -> None:
    """Refuse what cannot be the id of a dataset."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(repo if isinstance(repo, str) else "")
    except HFValidationError:
        raise InputError(
            f"Pushing to {shortened(repo)}: this is not the id of a dataset. Use one like 'name/dataset'."
        ) from None


def upload(folder: Path, repo: str, card: str, *, public: bool) -> str:
    """Upload the files of a folder, without hidden ones, and its card; return the address.

    The dataset is made if it is not there: private, unless it is to be `public`. Access comes from `hf auth login`.
    """
    from huggingface_hub import CommitOperationAdd, HfApi
    from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError
    from huggingface_hub.errors import HTTPError as AnyHTTPError  # pyright: ignore[reportPrivateImportUsage]

    check_repo(repo)
    operations = []
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        is_hidden = "/." in f"/{name}"
        if path.is_file() and not path.is_symlink() and not is_hidden and name != CARD:
            operations.append(CommitOperationAdd(name, path))
    operations.append(CommitOperationAdd(CARD, card.encode()))
    api = HfApi()
    doing = f"Pushing to {shortened(repo)}"
    try:
        api.create_repo(repo, repo_type="dataset", private=not public, exist_ok=True)
        api.create_commit(repo, operations, commit_message="Push results of identikit", repo_type="dataset")
    except (HfHubHTTPError, LocalTokenNotFoundError) as error:
        reason = " ".join(str(error).split())[:200].rstrip(".")
        advice = "Log in with `hf auth login`, and check the id."
        raise InputError(f"{doing}: the hub refused it ({reason}). {advice}") from None
    except (AnyHTTPError, OSError) as error:
        raise InputError(f"{doing}: the hub does not answer ({type(error).__name__}). Try again later.") from None
    return f"{api.endpoint}/datasets/{repo}"


def result_card(repo: str, result: "Result") -> str:
    """Return the card of a result: what it says, what it was computed from, and how to open it."""
    source = result.provenance
    about = {
        "model": source.model,
        "revision": source.revision,
        "SHA-256 of the weights": source.weights,
        "SHA-256 of the text": source.text,
        "number format": source.dtype,
        **{f"version of {name}": version for name, version in source.versions.items()},
    }
    says = f"# {result.kind.capitalize()}\n\n```text\n{result}\n```"
    return "\n\n".join([_front(()), says, "## Where it comes from", _listed(about), _OPENED.format(repo=repo)])


def run_card(
    settings: Mapping[str, Any], recorded: Mapping[str, Any], columns: Mapping[str, Mapping[str, Mapping[str, Any]]]
) -> str:
    """Return the card of a run: its tables with the meaning of every column, and what it was computed from."""
    model = recorded.get("model", {}).get("name", "a model")
    about = {
        "model": model,
        "SHA-256 of the weights": settings.get("model", {}).get("weights", ""),
        "SHA-256 of the data": settings.get("data", {}).get("sha256", ""),
        **{f"option {name}": value for name, value in settings.get("options", {}).items()},
        **{f"version of {name}": version for name, version in settings.get("versions", {}).items()},
    }
    title = f"# identikit {settings.get('command', 'run')}: {model}"
    sections = [_front([*columns]), title, "## Where it comes from", _listed(about)]
    for table, described in columns.items():
        lines = ["| column | meaning | range |", "|---|---|---|"]
        lines += [f"| `{name}` | {column['meaning']} | {column['range']} |" for name, column in described.items()]
        sections += [f"## {table}", "\n".join(lines)]
    return "\n\n".join(sections) + "\n"


_OPENED = """## How to open it

```python
import identikit as ik
from huggingface_hub import snapshot_download

result = ik.open_result(snapshot_download("{repo}", repo_type="dataset"))
```
"""


def _front(tables: Sequence[str]) -> str:
    """Return what the hub reads at the top of a card: tags, and the tables that its viewer shows."""
    lines = ["---", "tags:", "- identikit", "- interpretability"]
    if tables:
        lines.append("configs:")
        for name in tables:
            lines += [f"- config_name: {name}", f"  data_files: {name}.parquet"]
    return "\n".join([*lines, "---"])


def _listed(about: Mapping[str, object]) -> str:
    return "\n".join(f"- {name}: {value}" for name, value in about.items() if value not in ("", None))
