"""Upload a checkpoint to the Hub, after its files are checked for private data."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten
from typing import Any

import yaml
from huggingface_hub import CommitOperationAdd, HfApi, ModelCard
from huggingface_hub.errors import HFValidationError, HTTPError
from huggingface_hub.utils import validate_repo_id

from ..families.checkpoint import CARD, PICKLED_FILES, has_safetensors
from ..families.errors import ConversionError
from .card import PLACEHOLDER
from .folder import KNOWN, other_files
from .folder_layout import read_layout


# Access tokens of the Hub.
TOKEN = re.compile(rb"\b(?:hf_jwt_[A-Za-z0-9._-]{30,}|(?:hf_(?:oauth_)?|api_org_)[A-Za-z0-9]{30,})")
# Paths in a home folder, which reveal a machine or user, except in URLs. A vocabulary may contain any single word.
HOME = re.compile(rb"(?<![\w.-])(?:/home/|/Users/|/root/|[A-Za-z]:\\{1,2}Users\\{1,2})[A-Za-z0-9._-]+[/\\]?")
VOCABULARIES = ("tokenizer.json", "vocab.json", "vocab.txt", "merges.txt")
# Length in bytes of the field with a safetensors header's length; only the header of such a file is checked.
HEADER_LENGTH_BYTES = 8
PICKLES = (*PICKLED_FILES, "*.pt", "*.pth", "*.bin", "*.pkl", "*.ckpt")


@dataclass(frozen=True)
class Upload:
    """The plan of a push.

    Attributes:
        folder: folder of the checkpoint.
        repository: `user/name`.
        files: sizes in bytes by relative path.
        left_out: relative paths that do not belong to a checkpoint and are not uploaded.
        card: metadata of README.md; {} for none.
        card_text: README.md as it will be uploaded; None for none.
        problems: reasons to reject the upload.
        remarks: missing information for readers of the repository.
    """

    folder: Path
    repository: str
    files: dict[str, int]
    left_out: tuple[str, ...]
    card: dict[str, Any]
    problems: tuple[str, ...]
    remarks: tuple[str, ...]
    card_text: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """The plan in a form for JSON."""
        return {
            "folder": str(self.folder),
            "repository": self.repository,
            "files": self.files,
            "left_out": list(self.left_out),
            "card": self.card,
            "problems": list(self.problems),
            "remarks": list(self.remarks),
        }


def plan_upload(folder: str | Path, repository: str, base_model: str | None = None) -> Upload:
    """Check the files of a checkpoint, without any upload.

    In the uploaded card, code that loads the model names the repository; the card in the folder stays as it is.

    Args:
        folder: folder with config.json and safetensors, from `save_pretrained`, `convert` or the Trainer.
        repository: `user/name`.
        base_model: repository of the model that it was made from, for the metadata of the card; None for what the card
            says.

    Raises:
        ConversionError: for a folder without a checkpoint, a name that the Hub rejects, and a `base_model` without a
            card.
    """
    top = Path(folder).expanduser().resolve()
    encoder = top / read_layout(top).encoder
    if not ((encoder / "config.json").is_file() and has_safetensors(encoder)):
        raise ConversionError(
            f"folder = '{folder}' holds no checkpoint: config.json or safetensors are missing; give the folder that "
            "save_pretrained or hf-relpos convert wrote"
        )
    for field, name in (("repository", repository), ("base_model", base_model)):
        try:
            if name is not None:
                validate_repo_id(name)
        except HFValidationError as error:
            raise ConversionError(f"{field} = {name!r}: {error}; give user/name") from error
    if "/" not in repository:
        raise ConversionError(f"repository = {repository!r} has no owner; give user/name")

    left_out = tuple(other_files(top, tuple(name for name in KNOWN if name != ".gitattributes")))
    paths = [
        path
        for path in sorted(top.rglob("*"))
        if path.is_file() and not any(_within(path.relative_to(top).as_posix(), name) for name in left_out)
    ]
    files = {path.relative_to(top).as_posix(): path.stat().st_size for path in paths}
    card, card_text, problems = _read_card(top / CARD, repository, base_model)
    if card_text is not None:
        files[CARD] = len(card_text.encode())
    for name, path in zip(files, paths, strict=True):
        if any(path.match(pattern) for pattern in PICKLES):
            problems.append(f"{name} is a pickle, which runs code where it is read; save safetensors")
        elif found := private_words(path, top):
            problems.append(f"{name} holds {', '.join(found)}, of this machine; take it out")
    remedy = "--base-model USER/NAME does" if card_text is not None else "`Trainer.create_model_card` writes a card"
    remarks = [
        f"the card names no {field}: {why}"
        for field, why in (
            ("license", "without one nobody may use the model"),
            ("base_model", f"its page will not say what it was made from; {remedy}"),
        )
        if not card.get(field)
    ]
    return Upload(top, repository, files, left_out, card, tuple(problems), tuple(remarks), card_text)


def _within(path: str, name: str) -> bool:
    """Whether a path has that name, or is in the folder of that name, which ends in a slash."""
    return path == name or (name.endswith("/") and path.startswith(name))


def _read_card(path: Path, repository: str, base_model: str | None) -> tuple[dict[str, Any], str | None, list[str]]:
    """Metadata and text of a card as it will be uploaded, {} and None for none, and its problems.

    Raises:
        ConversionError: for a `base_model` without a card.
    """
    if not path.is_file():
        if base_model is not None:
            raise ConversionError(
                f"base_model = {base_model!r}: {path.name} is missing, which would name it; "
                "`Trainer.create_model_card` writes one"
            )
        return {}, None, []
    try:
        text = path.read_text("utf-8").replace(f'("{PLACEHOLDER}"', f'("{repository}"')
        card = ModelCard(text)
        if base_model is not None:
            card.data["base_model"] = base_model
            text = str(card)
        # YAML dates become strings
        return json.loads(json.dumps(card.data.to_dict(), default=str)), text, []
    except (ValueError, TypeError, KeyError, yaml.YAMLError) as error:
        reason = shorten(str(error), 160, placeholder=" …")
        return {}, None, [f"{CARD}: its metadata cannot be read ({reason}); correct it"]


def private_words(path: Path, folder: Path) -> list[str]:
    """Local paths in a file, and a mention of access tokens, which are not repeated.

    Args:
        folder: folder whose own path is searched for, too.
    """
    with path.open("rb") as file:
        if path.suffix == ".safetensors":
            length = int.from_bytes(file.read(HEADER_LENGTH_BYTES), "little")
            content = file.read(min(length, path.stat().st_size))
        else:
            content = file.read()
    found = {"an access token"} if TOKEN.search(content) else set()
    if path.name not in VOCABULARIES:
        found |= {match.decode("utf-8", "replace") for match in HOME.findall(content)}
        found |= {str(each) for each in (Path.home(), folder) if len(each.parts) > 2 and str(each).encode() in content}
    return sorted(found)


def push(
    upload: Upload,
    private: bool = False,
    message: str = "Upload model with hf_relpos",
    revision: str | None = None,
    create_pr: bool = False,
) -> str:
    """Upload the files of a plan in one commit; the repository is created if it does not exist.

    Args:
        private: create a private repository; an existing one must be private.
        message: commit message.
        revision: a branch of an existing repository; None for "main", of a new repository if needed.
        create_pr: open a pull request.

    Returns:
        The address of the commit, or of the pull request.

    Raises:
        ConversionError: for an upload with problems, a public repository with `private` set, and errors of the Hub.
    """
    if upload.problems:
        raise ConversionError(f"{upload.folder}: not uploaded: {'; '.join(upload.problems)}")
    written = {} if upload.card_text is None else {CARD: upload.card_text.encode()}
    api = HfApi(library_name="hf_relpos")
    try:
        if revision is None:  # a branch implies an existing repository
            api.create_repo(upload.repository, private=private, exist_ok=True)
        if private and not api.model_info(upload.repository).private:
            raise ConversionError(
                f"repository = {upload.repository!r} is public, and private was asked for; nothing was uploaded. "
                "Change it in its settings, or choose another name"
            )
        commit = api.create_commit(
            upload.repository,
            [CommitOperationAdd(name, written.get(name, upload.folder / name)) for name in upload.files],
            commit_message=message,
            revision=revision,
            create_pr=create_pr,
        )
    except ConversionError:
        raise
    # no token, no connection, no write access, a rejected card, a client's error
    except (OSError, ValueError, HTTPError) as error:
        reason = shorten(str(error), 240, placeholder=" …")
        raise ConversionError(
            f"repository = {upload.repository!r}: could not be uploaded ({type(error).__name__}: {reason}). Check the "
            "connection, and `hf auth whoami`"
        ) from error
    return commit.pr_url or commit.commit_url
