"""Make an environment with torch's CUDA build and the pretended driver, and run commands on a
pretended card.

    python tests/pretended_gpu/environment.py make                    once: about 5 GB, several minutes
    python tests/pretended_gpu/environment.py run 90 python -m pytest tests/pretended_gpu
                                                                      SM: 75, 80, 86, 89, 90, 100 or
                                                                          120

It is in `.pretended-gpu` of the checkout, or where PRETENDED_GPU says. What is run sees the
checkout's `src` and `tests`, and keeps compiled kernels apart by card. PRETENDED_CARDS=2 pretends
two of them; driver/device.c has the other settings. Standard library only, since it runs before
anything is installed.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DRIVER = Path(__file__).resolve().parent / "driver"
CARDS = ("75", "80", "86", "89", "90", "100", "120")
LIBRARY = "libcuda.so.1"
COMPILE = (
    "gcc",
    "-shared",
    "-fPIC",
    "-O1",
    "-fvisibility=hidden",
    "-Wall",
    "-Wextra",
    "-Wno-unused-parameter",
)


class Stopped(Exception):
    """One line says why it cannot go on."""


def home() -> Path:
    return Path(os.environ.get("PRETENDED_GPU") or ROOT / ".pretended-gpu").resolve()


def python() -> Path:
    return home() / "venv" / "bin" / "python"


def digest(*paths: Path) -> str:
    """Return a name for these files' content."""
    content = hashlib.sha256(b"".join(path.read_bytes() for path in paths))
    return content.hexdigest()[:12]


def compiled() -> Path:
    """Return the folder of the driver that these sources make, so that one in use is never
    overwritten.
    """
    return home() / "driver" / digest(*sorted(DRIVER.glob("*.[ch]")), Path(__file__))


def stamp() -> tuple[Path, str]:
    """Return the file that a whole installation ends with, and what it says."""
    wanted = digest(ROOT / "constraints.txt", ROOT / "pyproject.toml")
    return home() / "venv" / "made", f"{ROOT} {sys.version} {wanted}"


def say(text: str) -> None:
    print(f"pretended-gpu     {text}", file=sys.stderr, flush=True)


def make() -> None:
    if not shutil.which(COMPILE[0]):
        raise Stopped(
            "gcc is missing: the driver is compiled on this machine (Debian and Ubuntu: apt install gcc)"
        )
    path, text = stamp()
    if not path.exists() or path.read_text() != text:
        install()
        path.write_text(text)
    build_driver()
    say("ready: python tests/pretended_gpu/environment.py run 90 python ...")


def install() -> None:
    """Install torch's CUDA build, and the project with what its tests need."""
    say(
        f"downloads about 5 GB (torch's CUDA build and what the tests need) to {home()}; two minutes on a fast line"
    )
    if not python().exists():
        subprocess.run([sys.executable, "-m", "venv", home() / "venv"], check=True)
    pins = (ROOT / "constraints.txt").read_text().splitlines()
    version = next(pin for pin in pins if pin.startswith("torch==")).removeprefix("torch==")
    # Three equals signs ask for exactly this build; with two, an index may give a local one such as
    # 2.13.0+cpu.
    pip(f"torch==={version}", "setuptools")
    includes()  # a CPU build has none, and the rest need not be fetched then
    others = home() / "constraints.txt"
    others.write_text("\n".join(pin for pin in pins if not pin.startswith("torch==")))
    pip(
        "--no-build-isolation",
        "--constraint",
        str(others),
        "--editable",
        f"{ROOT}[dev]",
        "coverage>=7.10",
    )


def pip(*arguments: str) -> None:
    done = subprocess.run([python(), "-m", "pip", "install", "--quiet", *arguments], cwd=ROOT)
    if done.returncode:
        raise Stopped(
            f"pip could not install {arguments[0]}: see above; the same command goes on from here"
        )


def includes() -> list[Path]:
    """Return the folders of NVIDIA's headers, which come with torch's CUDA build."""
    program = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
    site = Path(
        subprocess.run(
            [python(), "-c", program], check=True, capture_output=True, text=True
        ).stdout.strip()
    )
    folders = [site / "nvidia/cu13/include", site / "triton/backends/nvidia/include"]
    if not all((folder / "cuda.h").exists() for folder in folders):
        raise Stopped(
            "torch came without CUDA's headers: this package index has its CPU build only"
        )
    return folders


def build_driver() -> None:
    """Compile the driver, unless it is there."""
    folder = compiled()
    if (folder / LIBRARY).exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    link = folder / "libcuda.so"  # Triton links with this name
    if not link.is_symlink():
        link.symlink_to(LIBRARY)
    unfinished = folder / f"{LIBRARY}.{os.getpid()}"
    paths = [f"-I{path}" for path in includes()]
    sources = sorted(DRIVER.glob("*.c"))
    done = subprocess.run(
        [
            *COMPILE,
            f"-Wl,-soname,{LIBRARY}",
            *paths,
            *sources,
            "-ldl",
            "-lpthread",
            "-o",
            unfinished,
        ]
    )
    if done.returncode:
        raise Stopped("the driver cannot be compiled: see above")
    unfinished.rename(folder / LIBRARY)


def environment(sm: str) -> dict[str, str]:
    """Return the environment of a command on a card; what the caller has set of caches stays."""
    if sm not in CARDS:
        raise Stopped(f"sm_{sm} is no card that is pretended: {' '.join(CARDS)}")
    if not python().exists():
        raise Stopped("not made yet: python tests/pretended_gpu/environment.py make")
    build_driver()
    cache = os.environ.get("TORCHINDUCTOR_CACHE_DIR") or str(home() / "cache" / f"sm{sm}")
    defaults = {
        "TORCHINDUCTOR_CACHE_DIR": cache,
        "TRITON_CACHE_DIR": f"{cache}/triton",
        # A pool of compilers would preload the driver, too, and wait for it.
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "MONOGRAPH_HOME": str(home() / "monograph"),
    }
    paths = {
        "PATH": str(python().parent),
        "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT / 'tests'}",
    }
    paths = {
        name: os.pathsep.join(filter(None, [path, os.environ.get(name)]))
        for name, path in paths.items()
    }
    driver = str(compiled())
    return {
        **defaults,
        **os.environ,
        **paths,
        "PRETENDED_SM": sm,
        "LD_PRELOAD": f"{driver}/{LIBRARY}",
        "LD_LIBRARY_PATH": driver,  # for what opens the library by its name
        "TRITON_LIBCUDA_PATH": driver,
        "PYTORCH_NVML_BASED_CUDA_CHECK": "0",  # the kernel has no NVIDIA module to ask
    }


def main(arguments: list[str]) -> int:
    match arguments:
        case ["make"]:
            make()
        case ["run", sm, command, *rest]:
            settings = environment(sm)
            os.execvpe(command, [command, *rest], settings)
        case _:
            raise Stopped("make, or run SM COMMAND ...")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except Stopped as stopped:
        say(str(stopped))
        sys.exit(2)
