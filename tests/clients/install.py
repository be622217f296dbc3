"""Makes virtual environments for clients that nobody here wrote: `python install.py OWN_SITE_PACKAGES VENV`.

It sees the packages of npucompile's environment but torch_npu, which clients would take for a sign of an NPU, and npucompile. Routers
(routers.txt) have environments of their own inside it, and see nothing else.
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


def install_routers(folder: Path) -> None:
    """Makes an environment for each router in a folder, named like its package."""
    lines = Path(__file__).with_name("routers.txt").read_text(encoding="utf-8").splitlines()
    for requirement in (line for line in lines if line and not line.startswith("#")):
        path = folder / requirement.partition("==")[0]
        venv.create(path, with_pip=True)
        subprocess.run([path / "bin" / "python", "-m", "pip", "install", "--no-compile", "--quiet", requirement], check=True)


if __name__ == "__main__":
    install(Path(sys.argv[1]), Path(sys.argv[2]))
    install_routers(Path(sys.argv[2]) / "routers")
