"""The address of the repository (REPOSITORY), for links of README.md on PyPI; the workflow of a release gives it."""

import os
import re
from pathlib import Path

from setuptools import setup


address = os.environ.get("REPOSITORY", "").rstrip("/")
readme = Path(__file__).with_name("README.md").read_text("utf-8")
setup(
    long_description=re.sub(r"\]\((?!https?:|#)", f"]({address}/blob/HEAD/", readme) if address else readme,
    long_description_content_type="text/markdown",
    project_urls={"Repository": address, "Changelog": f"{address}/blob/HEAD/CHANGELOG.md"} if address else {},
)
