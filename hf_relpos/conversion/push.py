"""Upload a checkpoint to the Hub: its own files alone, without paths of this machine and access tokens."""

from dataclasses import dataclass, field
from pathlib import Path
from textwrap import shorten

import yaml
from huggingface_hub import CommitOperationAdd, HfApi, ModelCard
from huggingface_hub.errors import HFValidationError, HTTPError
from huggingface_hub.utils import validate_repo_id

from ..families.checkpoint import CARD, has_safetensors
from ..families.errors import ConversionError
from ..families.privacy import private_words
from .card import PLACEHOLDER
from .folder import KNOWN, other_files, read_layout


@dataclass(frozen=True)
class Upload:
    """The plan of a push.

    Attributes:
        folder: folder of the checkpoint.
        repository: `user/name`.
        files: sizes in bytes by relative path.
        left_out: relative paths that do not belong to a checkpoint and are not uploaded.
        problems: reasons to reject the upload.
        card: README.md as it will be uploaded; empty for none.
    """

    folder: Path
    repository: str
    files: dict[str, int]
    left_out: tuple[str, ...]
    problems: tuple[str, ...]
    card: str = field(repr=False)


def plan_upload(folder: str | Path, repository: str) -> Upload:
    """Check the files of a checkpoint, without any upload.

    In the uploaded card, code that loads the model names the repository; the card in the folder stays as it is.

    Args:
        folder: folder with config.json and safetensors, from `save_pretrained`, `convert` or the Trainer.
        repository: `user/name`.

    Raises:
        ConversionError: for a folder without a checkpoint, and a name that the Hub rejects.
    """
    top = Path(folder).expanduser().resolve()
    encoder = top / read_layout(top).encoder
    if not ((encoder / "config.json").is_file() and has_safetensors(encoder)):
        raise ConversionError(
            f"folder = '{folder}' is not a checkpoint: config.json or safetensors are missing; give a folder that "
            "save_pretrained or hf-relpos convert wrote"
        )
    try:
        validate_repo_id(repository)
    except HFValidationError as error:
        raise ConversionError(f"repository = {repository!r}: {error}; give user/name") from error
    if "/" not in repository:
        raise ConversionError(f"repository = {repository!r} has no owner; give user/name")

    left_out = other_files(top, tuple(name for name in KNOWN if name != ".gitattributes"))
    stays = {top / name for name in left_out}
    paths = [path for path in sorted(top.rglob("*")) if path.is_file() and not stays & {path, *path.parents}]
    problems = [
        f"{path.relative_to(top)} holds {', '.join(found)} of this machine; remove it"
        for path in paths
        if (found := private_words(path, top))
    ]
    card = (top / CARD).read_text("utf-8") if (top / CARD).is_file() else ""
    card = card.replace(f'("{PLACEHOLDER}"', f'("{repository}"')
    try:
        ModelCard(card)
    except (ValueError, TypeError, KeyError, yaml.YAMLError) as error:
        problems.append(f"{CARD}: its metadata cannot be read ({shorten(str(error), 160)}); correct it")
    files = {path.relative_to(top).as_posix(): path.stat().st_size for path in paths}
    return Upload(top, repository, files, tuple(left_out), tuple(problems), card)


def push(upload: Upload, private: bool = False) -> str:
    """Upload the files of a plan in one commit; the repository is created if it does not exist.

    Args:
        private: create a private repository; an existing one must be private.

    Returns:
        The address of the commit.

    Raises:
        ConversionError: for an upload with problems, a public repository with `private` set, and errors of the Hub.
    """
    name = upload.repository
    if upload.problems:
        raise ConversionError(f"{upload.folder}: not uploaded: {'; '.join(upload.problems)}")
    api, cards = HfApi(library_name="hf_relpos"), {CARD: upload.card.encode()}
    files = [CommitOperationAdd(file, cards.get(file, upload.folder / file)) for file in upload.files]
    try:
        api.create_repo(name, private=private, exist_ok=True)
        if not private or api.model_info(name).private:
            return str(api.create_commit(name, files, commit_message="Upload model with hf_relpos").commit_url)
    except (OSError, ValueError, HTTPError) as error:  # no token, no connection, no write access, a rejected card
        raise ConversionError(
            f"repository = {name!r}: could not be uploaded ({type(error).__name__}: {shorten(str(error), 240)}). "
            "Check the connection, and `hf auth whoami`"
        ) from error
    raise ConversionError(
        f"repository = {name!r} is public, but private = True; nothing was uploaded. Change its settings, or choose "
        "another name"
    )
