"""`xorl version`: the installed versions and the hardware, for bug reports."""

import platform
from importlib.metadata import version

import typer

DISTRIBUTIONS = ("xorl-cli", "xorl-lora", "xorl-core", "xorl-kernels", "xorl-data", "xorl-ckpt")

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command(name="version")
def version_command() -> None:
    """Print the versions of xorl, torch and Python, and the devices."""
    print_versions()


def print_versions() -> None:
    """Prints a line for each package, Python, the platform and the devices."""
    rows = [(name, version(name)) for name in (*DISTRIBUTIONS, "torch")]
    rows += [("python", platform.python_version()), ("platform", platform.platform()), ("device", _devices())]
    width = max(len(name) for name, _ in rows)
    for name, text in rows:
        print(f"{name:<{width}}  {text}")


def _devices() -> str:
    import torch  # noqa: PLC0415  (slow)

    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    counts = [f"{names.count(name)} x {name}" for name in dict.fromkeys(names)]
    return ", ".join(counts) or f"CPU, {torch.get_num_threads()} threads"
