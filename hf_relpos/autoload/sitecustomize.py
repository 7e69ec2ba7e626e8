"""Imported by Python when it starts below `hf-relpos run`: autoload, and then the program's own sitecustomize."""

import importlib.util
import os
import sys


if __name__ == "sitecustomize":
    try:
        from hf_relpos.autoload import start

        start()
    except Exception as error:
        sys.stderr.write(f"hf-relpos: no model is optimized, since {sys.executable} has no hf_relpos: {error}\n")
    # The program finds its modules as without us; programs that it starts find this file by PYTHONPATH.
    folder = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [each for each in sys.path if os.path.abspath(each) != folder]
    ours = sys.modules.pop(__name__)
    try:
        spec = importlib.util.find_spec(__name__)
    finally:
        sys.modules[__name__] = ours
    if spec is not None and spec.loader is not None:
        sys.modules[__name__] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[__name__])
