"""Makes the machine ready: system packages, the project's own .venv, PyTorch, the pinned Python packages.

Every step looks first and is silent when there is nothing to do: the second time all of it takes milliseconds.
"""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import torch_pin

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"


class Failure(Exception):
    """Something the user has to know, in words."""


def say(message: str) -> None:
    print(f"dev: {message}", file=sys.stderr, flush=True)


def system_package(name: str, present: bool) -> None:
    """Installs a Debian package unless what it brings is present."""
    if present:
        return
    say(f"installing the system package {name}")
    root = [] if os.geteuid() == 0 else ["sudo"] if sys.stdin.isatty() else ["sudo", "--non-interactive"]
    tools = ["apt-get", *root[:1]]
    if lacking := [tool for tool in tools if not shutil.which(tool)]:
        raise Failure(f"cannot install {name}: no {' and no '.join(lacking)} here. Install it by hand, then run again.")
    apt = [*root, "env", "DEBIAN_FRONTEND=noninteractive", "apt-get", "-qq"]
    subprocess.run([*apt, "update"], stdout=subprocess.DEVNULL)
    install = subprocess.run(
        [*apt, "install", "--yes", "--no-install-recommends", name], stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    if install.returncode:
        raise Failure(
            f"cannot install {name}: apt-get said\n{install.stdout.decode()}Install it by hand, then run again."
        )


def compiler() -> None:
    system_package("g++", shutil.which(os.environ.get("CXX", "g++")) is not None)


def googletest() -> None:
    system_package("libgtest-dev", Path("/usr/include/gtest/gtest.h").exists())


def arm_tools() -> None:
    """A compiler for 64-bit ARM, a program that runs what it makes, and the sources of GoogleTest."""
    system_package("g++-aarch64-linux-gnu", shutil.which("aarch64-linux-gnu-g++") is not None)
    system_package("qemu-user", shutil.which("qemu-aarch64") is not None)
    system_package("libgtest-dev", Path("/usr/src/googletest/CMakeLists.txt").exists())


def googlebenchmark() -> None:
    system_package("libbenchmark-dev", Path("/usr/include/benchmark/benchmark.h").exists())


def enter_venv() -> None:
    """Goes on in .venv, and makes it first, unless this runs in it already."""
    if VENV.exists() and os.path.samefile(sys.prefix, VENV):
        return
    make_venv()
    python = str(VENV / "bin/python")
    os.execv(python, [python, *sys.argv])


def make_venv() -> None:
    """Makes .venv for the Python that runs this. ./dev takes a .venv with pip for complete, so pip comes last."""
    say(f"making .venv for Python {sys.version.split()[0]}")
    subprocess.run([sys.executable, "-m", "venv", "--clear", "--without-pip", VENV], check=True)
    for ninja in ROOT.glob("build/torch-*/build.ninja"):
        ninja.unlink()  # PyTorch may lie elsewhere now: configure again
    (site,) = VENV.glob("lib/python*/site-packages")
    # quire itself is imported from the source tree.
    (site / "quire_dev.pth").write_text("\n".join([str(ROOT / "python"), *borrowed_folders()]) + "\n")
    if subprocess.run([VENV / "bin/python", "-c", "import pip"], stderr=subprocess.DEVNULL).returncode:
        system_package(f"python3.{sys.version_info.minor}-venv", importlib.util.find_spec("ensurepip") is not None)
        pip = [VENV / "bin/python", "-m", "ensurepip", "--default-pip"]
        subprocess.run(pip, check=True, stdout=subprocess.DEVNULL)


def borrowed_folders() -> list[str]:
    """The package folders of the Python that runs this, if a PyTorch that suits can be imported there."""
    version = torch_pin.installed()
    if not torch_pin.suits(version) or subprocess.run([sys.executable, "-c", "import torch"]).returncode:
        return []
    say(f"using PyTorch {version} of {sys.prefix}")
    return [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]


def install(torch: bool, *extra: str) -> None:
    """Installs the pinned packages not yet here, PyTorch if asked, and without what they ask for themselves those of
    further groups. If it cannot, goes on with what there is."""
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]
    missing = not_here(groups["dev"])
    torch_missing = torch and not torch_pin.suits(torch_pin.installed())
    if torch_missing:
        missing.insert(0, f"torch=={torch_pin.wanted()}")
    if not pip_install(missing) and torch_missing:
        raise Failure(f"cannot install {missing[0]}, without which nothing works. Is a package index in reach?")
    for group in extra:
        pip_install(not_here(groups[group]), "--no-deps")


def venv_beside(name: str, group: str) -> Path:
    """The Python of build/NAME, a virtual environment with the packages of that group and, by the way, what .venv and
    the source tree have: what must not be in .venv, because it changes what others import."""
    folder = ROOT / "build" / name
    python = folder / "bin/python"
    if not python.exists():
        say(f"making {folder.relative_to(ROOT)}")
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
    (site,) = folder.glob("lib/python*/site-packages")
    others = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    (site / "quire_beside.pth").write_text("\n".join([str(ROOT / "python"), *others]) + "\n")
    pins = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"][group]
    done = folder / "installed"
    if not done.exists() or done.read_text().split() != pins:
        say(f"installing {', '.join(pins)} into {folder.relative_to(ROOT)}")
        pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *pins]
        if subprocess.run(pip).returncode:
            raise Failure(f"cannot install the packages of group {group}. Is a package index in reach?")
        done.write_text("\n".join(pins) + "\n")
    return python


def not_here(pins: list[str]) -> list[str]:
    return [pin for pin in pins if version_of(pin) != pin.split("==")[1]]


def pip_install(pins: list[str], *options: str) -> bool:
    """Whether all are here now; says which are not."""
    if not pins:
        return True
    say(f"installing {', '.join(pins)} into .venv")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--retries=1", *options]
    if subprocess.run([*pip, *pins]).returncode == 0:
        return True
    for pin in pins:
        here = version_of(pin)
        say(f"cannot install {pin}: " + (f"going on with version {here}" if here else "whatever needs it will fail"))
    return False


def version_of(pin: str) -> str | None:
    try:
        return metadata.version(re.split("==", pin)[0])
    except metadata.PackageNotFoundError:
        return None


def tool(name: str) -> str:
    """The path of a program: of .venv, of the Python that .venv was made from or borrows from, or of the system."""
    folders = [str(VENV / "bin"), os.environ.get("PATH", os.defpath)]
    folders[1:1] = [str(Path(path).parents[2] / "bin") for path in sys.path if path.endswith("site-packages")]
    found = shutil.which(name, path=os.pathsep.join(folders))
    if not found:
        raise Failure(f"needs {name}, which is neither in .venv nor on PATH and could not be installed")
    return found
