"""The code of the models beside saved weights, so that `trust_remote_code=True` loads them where hf_relpos is not."""

import contextlib
import os
import re
import shutil
import uuid
import warnings
from collections.abc import Iterable
from pathlib import Path

from transformers.dynamic_module_utils import get_relative_import_files, get_relative_imports


# The module that `auto_map` names; it and what it imports are the files shipped as remote code.
ENTRY = Path(__file__).with_name("modeling_relpos_bert.py")


def code_files() -> set[str]:
    """Paths of the modeling file and of all that it imports from beside it."""
    entry = os.path.abspath(ENTRY)
    return {entry, *map(os.path.abspath, get_relative_import_files(entry))}


def shipped_files(folder: str | os.PathLike[str]) -> set[str]:
    """Names of the files in a folder that are copies of this code, of this release or another one.

    They are the folder's own modeling file and what that imports: a file of a user may have the name of one of ours,
    but is not imported from there.
    """
    found: set[str] = set()
    names = [ENTRY.name]
    while names:
        name = names.pop()
        path = Path(folder, name)
        if name not in found and path.is_file():
            found.add(name)
            names += [f"{module}.py" for module in get_relative_imports(path)]
    return found


def files_in_the_way(folder: str | os.PathLike[str]) -> list[str]:
    """Names of the files in a folder that have the name of one of ours and are no copies of it, sorted."""
    shipped = shipped_files(folder)
    clashes = []
    for file in map(Path, code_files()):
        path = Path(folder, file.name)
        same = path.is_file() and path.read_bytes() == file.read_bytes()
        if path.exists() and not same and file.name not in shipped:
            clashes.append(file.name)
    return sorted(clashes)


def copy_code(save_directory: str | os.PathLike[str]) -> bool:
    """Copy these files into a folder, and from a checkpoint of the Trainer into the folder above, too.

    A folder that holds another file of the same name, such as a user's own `memory.py`, gets none of them, and a
    `UserWarning` says so: an error would lose the weights that are about to be saved.

    Returns:
        Whether `save_directory` has them now.
    """
    folder = os.path.abspath(save_directory)
    folders = [folder]
    if re.fullmatch(r"checkpoint-\d+", os.path.basename(folder)):
        # from there the Trainer pushes config.json and weights of a checkpoint, but no other file of it
        folders.append(os.path.dirname(folder))
    complete = True
    for target in folders:
        os.makedirs(target, exist_ok=True)
        if clashes := files_in_the_way(target):
            warnings.warn(
                f"{target}: {', '.join(clashes)} {'is' if len(clashes) == 1 else 'are'} not hf_relpos's and left as "
                "it is, so the code of the model was not saved there, and trust_remote_code=True will not load it "
                "where hf_relpos is not installed. Save to another folder, or set model.config.save_code = False to "
                "do without",
                stacklevel=4,
            )
            complete = complete and target != folder
            continue
        for file in code_files():
            _copy_whole(file, os.path.join(target, os.path.basename(file)))
    return complete


def _copy_whole(file: str, target: str) -> None:
    """Copy a file such that `target` is always whole, also where the process is killed: the code is often replaced."""
    # Trainers do not push what begins with an underscore, should one of these be left behind
    partial = os.path.join(os.path.dirname(target), f"_{os.path.basename(target)}.{uuid.uuid4().hex[:8]}")
    try:
        shutil.copyfile(file, partial)
        os.replace(partial, target)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(partial)
        raise


def apply_umask(files: Iterable[Path]) -> None:
    """Give files the permissions of any other new file in their folder; safetensors 0.8 writes for the owner alone."""
    for file in files:
        probe = file.with_name(f".{file.name}.{uuid.uuid4().hex[:8]}")  # os.umask would change it for all threads
        probe.touch(exist_ok=False)
        mode = probe.stat().st_mode
        probe.unlink()
        file.chmod(mode)
