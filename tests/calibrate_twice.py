"""Calibrates a folder as `accelerate launch` starts it: source, text and result are the arguments."""

import sys
from pathlib import Path


if __name__ == "__main__":
    from hf_relpos.convert import convert

    source, text, out = sys.argv[1:4]
    convert(
        source,
        out,
        method="calibrate",
        texts=Path(text),
        method_options={"tokens": 2000},
        position_options={"terms": "ABcV"},
    )
