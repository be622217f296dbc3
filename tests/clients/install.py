"""Makes a virtual environment for clients that nobody here wrote: `python install.py OWN_SITE_PACKAGES VENV`.

It sees the packages of npucompile's environment but torch_npu, which clients would take for a sign of an NPU, and npucompile.
"""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

HIDDEN = ("torch_npu", "npucompile", "__editable__", "pip", "setuptools")


def install(own: Path, path: Path) -> None:
    """Makes the environment, links packages into it and installs the clients."""
    venv.create(path, with_pip=True)
    (site,) = path.glob("lib/python*/site-packages")
    # Before the links: pip would remove an older version through one.
    requirements = Path(__file__).with_name("requirements.txt")
    command = [path / "bin" / "python", "-m", "pip", "install", "--no-deps", "--no-compile", "--quiet", "-r", requirements]
    subprocess.run(command, check=True)
    names = {found.name.partition("-")[0].lower() for found in site.iterdir()}
    for package in own.iterdir():
        if package.suffix != ".pth" and not package.name.startswith(HIDDEN) and package.name.partition("-")[0].lower() not in names:
            (site / package.name).symlink_to(package)


if __name__ == "__main__":
    install(Path(sys.argv[1]), Path(sys.argv[2]))
