"""`moe-train doctor`: what this installation can do here."""

import json

from moe_train.cli.arguments import command_parser
from moe_train.cli.inventory import OUR_PREFIX, plugin_lines, table
from moe_train.observe.environment import accelerators, cores, versions


def main(arguments: list[str]) -> int:
    parser = command_parser(
        "doctor", "Say what this installation can do here, and why not the rest. 1 if it is broken."
    )
    parser.add_argument("--json", action="store_true", help="for programs")
    options = parser.parse_args(arguments)
    found, devices, plugins = versions(), accelerators(), plugin_lines()
    missing = [name for name, version in found.items() if version is None and name.startswith(OUR_PREFIX)]
    broken = [line.reason for line in plugins if line.reason and line.broken and line.ours]
    problems = [*(f"{name} is not installed" for name in missing), *broken]
    if options.json:
        report = {
            "versions": found,
            "accelerators": devices,
            "plugins": [line.to_json() for line in plugins],
            "problems": problems,
        }
        print(json.dumps(report, indent=2))
        return 1 if problems else 0
    width = max(map(len, found))
    for name, version in found.items():
        print(f"{'MISS' if version is None else 'OK  '}  {name:<{width}}  {version or 'not installed'}")
    print(f"OK    {'cpu':<{width}}  {cores()} cores")
    print("\n".join(f"OK    {'cuda':<{width}}  {device}" for device in devices) or _no_device(width))
    print("\n".join(["", *table(plugins)]))
    if problems:
        print("\n".join(["", "This installation is broken:", *problems]))
    return 1 if problems else 0


def _no_device(width: int) -> str:
    import torch

    built = torch.version.cuda
    reason = f"torch is built for CUDA {built} but sees no device" if built else "this torch is built for the CPU only"
    return f"MISS  {'cuda':<{width}}  {reason}; training runs on the CPU"
