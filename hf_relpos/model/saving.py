"""The code of the models beside saved weights, so that `trust_remote_code=True` loads them where hf_relpos is not."""

import os
import re
import shutil
from pathlib import Path

from transformers.dynamic_module_utils import get_relative_import_files


# The module that `auto_map` names; it and what it imports are the files shipped as remote code.
ENTRY = Path(__file__).with_name("modeling_relpos_bert.py")


def code_files() -> set[str]:
    """Paths of the modeling file and of all that it imports from beside it."""
    entry = os.path.abspath(ENTRY)
    return {entry, *map(os.path.abspath, get_relative_import_files(entry))}


def copy_code(save_directory: str | os.PathLike[str]) -> None:
    """Copy these files into a folder, and from a checkpoint of the Trainer into the folder above, too."""
    folder = os.path.abspath(save_directory)
    folders = [folder]
    if re.fullmatch(r"checkpoint-\d+", os.path.basename(folder)):
        # from there the Trainer pushes config.json and weights of a checkpoint, but no other file of it
        folders.append(os.path.dirname(folder))
    for target in folders:
        os.makedirs(target, exist_ok=True)
        for file in code_files():
            shutil.copyfile(file, os.path.join(target, os.path.basename(file)))
