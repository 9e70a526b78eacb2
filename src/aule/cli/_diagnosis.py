"""What ``aule doctor`` makes of the facts: one finding for each package, driver and setting, with its remedy. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from aule.cli._facts import Facts

OK, MISSING, PROBLEM = "ok", "missing", "problem"


@dataclass(frozen=True)
class Finding:
    """One line of the report: a status, what it is about, and the command or action that helps."""

    area: str
    name: str
    status: str
    text: str = ""
    remedy: str = ""


@dataclass(frozen=True)
class Package:
    """A package that aule uses: its name for pip, what it is for, and how to install it."""

    name: str
    purpose: str
    install: str
    least: tuple[int, ...] = ()
    platform: str = ""


def _extra(name: str) -> str:
    return f'pip install "aule-attention[{name}]"'


PACKAGES: tuple[Package, ...] = (
    Package("numpy", "needed", "pip install numpy", (1, 24)),
    Package("llvmlite", "the CPU engine, several times NumPy's speed", _extra("cpu"), (0, 45)),
    Package("torch", "PyTorch tensors and gradients", "pip install torch", (2, 6)),
    Package("pyopencl", "OpenCL devices", _extra("opencl")),
    Package("wgpu", "WebGPU devices", _extra("webgpu")),
    Package("pyobjc-framework-Metal", "Apple's GPUs", _extra("metal"), platform="darwin"),
    Package("ml_dtypes", "bfloat16 in NumPy arrays", "pip install ml_dtypes"),
    Package("transformers", "aule in transformers' models", "pip install transformers"),
    Package("diffusers", "aule in diffusers' pipelines", "pip install diffusers"),
    Package("matplotlib", "aule bench --plot", _extra("bench")),
)

_NVIDIA_DRIVER = {
    "ubuntu": "sudo ubuntu-drivers install",
    "debian": "sudo apt install nvidia-driver (from the section non-free)",
    "fedora": "sudo dnf install akmod-nvidia (from RPM Fusion)",
    "arch": "sudo pacman -S nvidia",
}
_VULKAN = {
    "debian": "sudo apt install libvulkan1 mesa-vulkan-drivers",
    "fedora": "sudo dnf install vulkan-loader mesa-vulkan-drivers",
    "arch": "sudo pacman -S vulkan-icd-loader",
}
_VULKAN_ARCH = {"amd": "vulkan-radeon", "intel": "vulkan-intel", "nvidia": "nvidia-utils"}
_OPENCL = {
    "debian": ("sudo apt install ocl-icd-libopencl1", "intel-opencl-icd", "mesa-opencl-icd", "pocl-opencl-icd"),
    "fedora": ("sudo dnf install ocl-icd", "intel-compute-runtime", "mesa-libOpenCL", "pocl"),
    "arch": ("sudo pacman -S ocl-icd", "intel-compute-runtime", "opencl-mesa", "pocl"),
}
"""The command with the loader, and drivers of Intel's GPUs, of AMD's, and of CPUs."""
_TORCH_SITE = "choose a build at https://pytorch.org/get-started/locally"


def diagnose(facts: Facts) -> list[Finding]:
    """Judge the facts."""
    return [*_packages(facts), *_drivers(facts), *_torch(facts), *_rest(facts)]


def _packages(facts: Facts) -> Iterator[Finding]:
    for package in PACKAGES:
        found = facts.packages.get(package.name)
        if package.platform not in ("", facts.platform):
            continue
        if found is None:
            yield Finding("packages", package.name, MISSING, f"for {package.purpose}", package.install)
        elif _numbers(found)[: len(package.least)] < package.least:
            least = ".".join(map(str, package.least))
            upgrade = package.install.replace("install", "install --upgrade")
            yield Finding("packages", package.name, PROBLEM, f"{found}, but {least} or newer is needed", upgrade)
        else:
            yield Finding("packages", package.name, OK, found)


def _numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: ``2.9.0+cu128`` is (2, 9, 0)."""
    found = []
    for part in version.partition("+")[0].split("."):
        if not part.isdigit():
            break
        found.append(int(part))
    return tuple(found)


# -- drivers -----------------------------------------------------------------------------------------------------------


def _drivers(facts: Facts) -> Iterator[Finding]:
    for path in facts.closed:
        remedy = 'sudo usermod -aG render,video "$USER", then log in again'
        yield Finding("drivers", path, PROBLEM, "this user may not open the GPU's device file", remedy)
    if "cuda" in facts.devices or "nvidia" in facts.gpus:
        yield _driver(facts, "cuda", _nvidia_remedy(facts))
    if "hip" in facts.devices or "amd" in facts.gpus or (facts.torch or {}).get("hip"):
        yield _driver(facts, "hip", f"for ROCm tensors in place, {_TORCH_SITE}")
    if facts.platform == "darwin":
        yield _driver(facts, "metal", _extra("metal"))
    yield _driver(facts, "vulkan", _vulkan_remedy(facts))
    if "pyopencl" in facts.packages:
        yield _driver(facts, "opencl", _opencl_remedy(facts))
    if "wgpu" in facts.packages:
        yield _driver(facts, "webgpu", _vulkan_remedy(facts))
    if "llvmlite" in facts.packages:
        yield _driver(facts, "cpu", _extra("cpu"))


def _driver(facts: Facts, backend: str, remedy: str) -> Finding:
    """Hardware is ok; software alone is a problem only where a GPU has no working driver at all."""
    devices, installed = facts.devices.get(backend), facts.drivers.get(backend)
    if _is_setting(facts.errors.get(backend, "")):
        return Finding("drivers", backend, PROBLEM, facts.errors[backend])
    known = f"; drivers installed: {', '.join(installed)}" if installed else ""
    idle_gpu = bool(facts.gpus) and not facts.hardware.keys() - {"cpu"}
    if devices is None:
        status = PROBLEM if backend == "cpu" or (idle_gpu and backend in ("cuda", "vulkan")) else MISSING
        return Finding("drivers", backend, status, facts.errors.get(backend, "no device") + known, remedy)
    names = ", ".join(name + (" (software)" if software else "") for name, software in devices)
    if idle_gpu and backend == "vulkan":
        vendors = " and ".join(facts.gpus)
        return Finding("drivers", backend, PROBLEM, f"{names} only, though there is a GPU of {vendors}{known}", remedy)
    return Finding("drivers", backend, OK, names + known)


def _nvidia_remedy(facts: Facts) -> str:
    return _NVIDIA_DRIVER.get(facts.distribution, "install the driver from https://www.nvidia.com/drivers")


def _vulkan_remedy(facts: Facts) -> str:
    if facts.platform == "darwin":
        return "not needed beside Metal; the Vulkan SDK from https://vulkan.lunarg.com has MoltenVK"
    family = "debian" if facts.distribution == "ubuntu" else facts.distribution
    if family not in _VULKAN:
        return "install your GPU's driver, which includes Vulkan"
    drivers = [_VULKAN_ARCH[vendor] for vendor in facts.gpus] or ["vulkan-swrast"]
    command = _VULKAN[family] + (f" {' '.join(drivers)}" if family == "arch" else "")
    if facts.gpus == ("nvidia",) and family != "arch":
        return _nvidia_remedy(facts)
    return command


def _opencl_remedy(facts: Facts) -> str:
    family = "debian" if facts.distribution == "ubuntu" else facts.distribution
    if family not in _OPENCL:
        return 'install your GPU\'s OpenCL driver, or PoCL for the CPU: pip install "pyopencl[pocl]"'
    command, intel, amd, cpu = _OPENCL[family]
    drivers = [{"intel": intel, "amd": amd}[vendor] for vendor in facts.gpus if vendor != "nvidia"]
    return f"{command} {' '.join(drivers or [cpu])}"


# -- PyTorch -----------------------------------------------------------------------------------------------------------


def _torch(facts: Facts) -> Iterator[Finding]:
    """Whether PyTorch runs, and whether its build is for the GPU that is there."""
    build, runs = facts.torch, facts.torch_runs or {}
    if build is None:
        return
    kinds = [
        f"{name} {build[kind]}" for kind, name in (("cuda", "CUDA"), ("hip", "ROCm"), ("xpu", "XPU")) if build[kind]
    ]
    name = f"{build['version']}, built for {', '.join(kinds) or ('MPS' if build['mps'] else 'the CPU alone')}"
    if "error" in runs:
        remedy = f"pip install --force-reinstall torch, or {_TORCH_SITE}"
        yield Finding("PyTorch", "import torch", PROBLEM, f"{name}: {runs['error']}", remedy)
        return
    nvidia = "cuda" in facts.devices or "nvidia" in facts.gpus
    if build["cuda"] and nvidia:
        yield _cuda_build(facts, name)
    elif nvidia:
        remedy = "pip install --force-reinstall torch" if facts.platform == "linux" else _TORCH_SITE
        text = f"{name}, beside an NVIDIA GPU: tensors stay on the CPU"
        yield Finding("PyTorch", "build", PROBLEM, text, remedy)
    elif "amd" in facts.gpus and facts.platform == "linux" and not build["hip"]:
        text = f"{name}, beside an AMD GPU, which aule itself reaches through Vulkan"
        yield Finding("PyTorch", "build", OK, text, f"for ROCm tensors, {_TORCH_SITE}")
    elif build["hip"] and not runs.get("available"):
        yield Finding(
            "PyTorch", "build", PROBLEM, f"{name}, but it finds no AMD GPU", f"install ROCm, or {_TORCH_SITE}"
        )
    elif build["hip"] and "hip" not in facts.devices:
        text = f"{name}, but aule cannot use its tensors in place and copies them through the host"
        reason = facts.errors.get("hip", "no device")
        yield Finding("PyTorch", "build", PROBLEM, f"{text}: {reason}", f"for one with its libraries, {_TORCH_SITE}")
    else:
        yield Finding("PyTorch", "build", OK, name)


def _cuda_build(facts: Facts, name: str) -> Finding:
    runs = facts.torch_runs or {}
    if not runs.get("available"):
        text = f"{name}, but it cannot use the GPU; its CUDA may be newer than the driver"
        return Finding(
            "PyTorch", "build", PROBLEM, text, f"update the driver ({_nvidia_remedy(facts)}), or {_TORCH_SITE}"
        )
    for gpu, major, minor in runs["gpus"]:
        if not _fits(runs["archs"], (major, minor)):
            archs = ", ".join(runs["archs"])
            text = f"{name} has no kernels for {gpu} (sm_{major}{minor}), only for {archs}"
            return Finding("PyTorch", "build", PROBLEM, text, f"pip install --upgrade torch, or {_TORCH_SITE}")
    return Finding("PyTorch", "build", OK, f"{name}; fits {', '.join(gpu for gpu, *_ in runs['gpus'])}")


def _fits(archs: list[str], capability: tuple[int, int]) -> bool:
    """Whether a list of architectures serves a GPU: binaries within its generation, PTX for all later ones."""
    for arch in archs:
        kind, _, number = arch.partition("_")
        digits = number.rstrip("af")
        if not digits.isdigit():
            continue
        built = (int(digits[:-1]), int(digits[-1]))
        if built <= capability and (kind == "compute" or built[0] == capability[0]):
            return True
    return False


# -- settings ----------------------------------------------------------------------------------------------------------


def _rest(facts: Facts) -> Iterator[Finding]:
    if facts.cache_error:
        remedy = "set AULE_CACHE_DIR to a folder of your own; without a cache every process compiles again"
        if _is_setting(facts.cache_error):
            remedy = ""
        yield Finding("settings", "cache", PROBLEM, facts.cache_error, remedy)
    else:
        yield Finding("settings", "cache", OK, "the folder can be written")
    if facts.default_error and not _is_setting(facts.default_error):
        yield Finding("settings", "AULE_BACKEND", PROBLEM, facts.default_error, "unset or change AULE_BACKEND")


def _is_setting(error: str) -> bool:
    """Whether a wrong environment variable is to blame, which the message names, with its own remedy."""
    return error.startswith("[settings]")
