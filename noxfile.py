"""Sessions of this repository. `nox` runs what a change must pass; `nox -s demo` trains; `nox -l` lists all.

Sessions test installed wheels, not the checkout. torch is large, so it is installed once into a base environment that
session environments see through a `.pth` file; the key of a base is what was asked for, and from which constraints.
"""

import hashlib
import os
import re
import subprocess
import sys
import tomllib
import venv
import zipfile
from collections.abc import Sequence
from pathlib import Path

import nox
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

ROOT = Path(__file__).parent
CONSTRAINTS = ROOT / "constraints.txt"
WHEELS = ROOT / "dist"
SIBLINGS = {
    "moe-parallel": [],
    "moe-kernels": [],
    "moe-comm": ["moe-parallel", "moe-kernels"],
    "moe-memory": ["moe-parallel", "moe-kernels"],
    "moe-train": ["moe-parallel", "moe-kernels", "moe-comm", "moe-memory"],
}
TORCH = ["torch", "numpy"]
BUILD = ["hatchling"]
RUNTIME = ["pydantic", "rich", "rich-argparse", "safetensors", "tomli-w"]
TESTS = ["pytest", "pytest-randomly", "pytest-timeout", "hypothesis", "transformers", "triton"]
CHECKS = ["ruff", "mypy", "import-linter"]

# One thread everywhere: OpenMP spin barriers make two threads on a busy core far slower than one.
QUIET = {"OMP_NUM_THREADS": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1", "HF_HUB_OFFLINE": "1"}

nox.needs_version = ">=2025.2.9"
nox.options.default_venv_backend = "virtualenv"
nox.options.reuse_existing_virtualenvs = True
nox.options.error_on_missing_interpreters = True
nox.options.sessions = ["lint", "imports", "typecheck", "wheels", "bare", "minimum", "tests"]

each_package = nox.parametrize("pkg", list(SIBLINGS), ids=list(SIBLINGS))


def module_name(pkg: str) -> str:
    return pkg.replace("-", "_")


def base_environment(name: str, requirements: list[str], on: Path | None = None) -> Path:
    """Site-packages of an environment with these requirements, built once; `on` is another base that it may see."""
    key = hashlib.sha256(
        "\n".join([sys.version, CONSTRAINTS.read_text(), *requirements, str(on)]).encode()
    ).hexdigest()[:12]
    home = ROOT / ".nox" / f"base-{name}-{key}"
    site_packages = home / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    complete = home / "complete"
    if not complete.exists():
        venv.create(home, clear=True, with_pip=True)
        if on is not None:
            link_base(site_packages, [on])
        command = [home / "bin" / "python", "-m", "pip", "install", "--quiet", "-c", CONSTRAINTS, *requirements]
        subprocess.run(list(map(str, command)), check=True, env={**os.environ, **QUIET})
        complete.touch()
    return site_packages


def link_base(site_packages: Path, bases: list[Path]) -> None:
    lines = [f"import site; site.addsitedir({str(base)!r})\n" for base in bases]
    (site_packages / "base.pth").write_text("".join(lines))


def torch_base() -> Path:
    return base_environment("torch", TORCH)


def tools_base() -> Path:
    return base_environment("tools", [*BUILD, *RUNTIME, *TESTS, *CHECKS], on=torch_base())


def use_bases(session: nox.Session, *bases: Path) -> None:
    location = session.run("python", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", silent=True)
    link_base(Path(str(location).strip()), list(bases))


_wheels: dict[str, Path] = {}


def wheel(pkg: str) -> Path:
    """The wheel of a package, built once per nox run from the checkout."""
    if pkg not in _wheels:
        python = tools_base().parents[2] / "bin" / "python"
        prefix = f"moe_stack_{pkg.removeprefix('moe-')}"
        for old in WHEELS.glob(f"{prefix}-*.whl"):
            old.unlink()
        command = [python, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", WHEELS]
        subprocess.run([*map(str, command), str(ROOT / "packages" / pkg)], check=True, env={**os.environ, **QUIET})
        (_wheels[pkg],) = WHEELS.glob(f"{prefix}-*.whl")
    return _wheels[pkg]


def wheels_of(pkg: str) -> list[str]:
    """The package's wheel and its siblings': always together, so that no sibling is looked up on an index."""
    return [str(wheel(name)) for name in [*SIBLINGS[pkg], pkg]]


def install_wheels(session: nox.Session, pkg: str) -> None:
    session.run("python", "-m", "pip", "install", "-q", "--force-reinstall", "--no-deps", *wheels_of(pkg), env=QUIET)
    # A test run that imports the checkout, or a stranger's package of the same name, proves nothing.
    check = (
        "import sys, importlib.util as u\n"
        "for name in sys.argv[1:]:\n"
        "    origin = u.find_spec(name).origin\n"
        "    assert origin.startswith(sys.prefix), f'{name} comes from {origin}'\n"
    )
    session.run("python", "-c", check, *map(module_name, [*SIBLINGS[pkg], pkg]), silent=True)


def run_pytest(session: nox.Session, pkg: str, *arguments: str, paths: Sequence[str] = ()) -> None:
    paths = paths or [f"packages/{pkg}/tests"]
    session.run("python", "-m", "pytest", "-p", "no:cacheprovider", *paths, *arguments, env=QUIET)


@nox.session
@each_package
def tests(session: nox.Session, pkg: str) -> None:
    """The package's tests against its installed wheel."""
    use_bases(session, tools_base())
    install_wheels(session, pkg)
    run_pytest(session, pkg, *session.posargs)


@nox.session
@each_package
def slow(session: nox.Session, pkg: str) -> None:
    """The tests that take minutes."""
    use_bases(session, tools_base())
    install_wheels(session, pkg)
    session.run(
        *["python", "-m", "pytest", "-p", "no:cacheprovider", "-m", "slow", "--timeout=1200"],
        *[f"packages/{pkg}/tests", *session.posargs],
        env=QUIET,
        success_codes=[0, 5],  # 5: this package has no slow test
    )


@nox.session
@each_package
def bare(session: nox.Session, pkg: str) -> None:
    """Installed with its declared dependencies and nothing else, every module of the package imports."""
    use_bases(session, torch_base())
    session.run("python", "-m", "pip", "install", "-q", "-c", str(CONSTRAINTS), *wheels_of(pkg), env=QUIET)
    install_wheels(session, pkg)
    check = (
        "import importlib, pkgutil, sys\n"
        "package = importlib.import_module(sys.argv[1])\n"
        "names = [m.name for m in pkgutil.walk_packages(package.__path__, package.__name__ + '.')]\n"
        # Kernels are imported when they are first needed, with the extra `triton`.
        "skipped = [n for n in names if n.endswith(('.testing', '.__main__')) or '.triton_kernels.' in n]\n"
        "for name in names:\n"
        "    if name not in skipped: importlib.import_module(name)\n"
        "for name in package.__all__: getattr(package, name)\n"
        "print(f'{sys.argv[1]}: {len(names) - len(skipped)} modules, {len(package.__all__)} public names')\n"
    )
    session.run("python", "-W", "error", "-c", check, module_name(pkg), env=QUIET)


@nox.session
@each_package
def minimum(session: nox.Session, pkg: str) -> None:
    """The tests with the lowest versions that the metadata allows, of everything but torch.

    Where that is numpy alone, they are the tests that have to do with it.
    """
    use_bases(session, tools_base())
    lowest = []
    for name in [*SIBLINGS[pkg], pkg]:
        project = tomllib.loads((ROOT / "packages" / name / "pyproject.toml").read_text())["project"]
        found = [re.fullmatch(r"([\w.-]+)>=([\w.]+)(?:,.*)?", line) for line in project["dependencies"]]
        lowest += [f"{m[1]}=={m[2]}" for m in found if m and m[1] != "torch" and not m[1].startswith("moe-stack-")]
    session.run("python", "-m", "pip", "install", "-q", *sorted(set(lowest)), env=QUIET)
    install_wheels(session, pkg)
    session.log("the lowest torch is not run here: only the pinned one is installed")
    paths = []
    if {requirement.partition("==")[0] for requirement in lowest} == {"numpy"}:
        paths = tests_with("numpy", pkg)
        if not paths:
            session.error(f"no test of {pkg} has to do with numpy")
    # Several processes use torch alone, which is the same here, and so is the compiler of kernels.
    arguments = ("-q", "-m", "not slow and not dist", "--ignore-glob=*/test_compiled.py")
    run_pytest(session, pkg, *arguments, *session.posargs, paths=paths)


def tests_with(library: str, pkg: str) -> list[str]:
    """Test files that name a library, or a module of the package that imports it."""
    folder = ROOT / "packages" / pkg
    users = [path.stem for path in (folder / "src").rglob("*.py") if f"import {library}" in path.read_text()]
    words = re.compile("|".join([library, *(rf"\b{user}\b" for user in users)]))
    return [str(path) for path in sorted((folder / "tests").glob("test_*.py")) if words.search(path.read_text())]


def released_commit(pkg: str) -> tuple[str, str] | None:
    """Version and commit of the last final release of a package, by tag or else by its version file in the history."""
    tags = git("tag", "--list", f"{pkg}-v*", "--sort=-version:refname").split()
    if tags:
        return tags[0].removeprefix(f"{pkg}-v"), tags[0]
    file = f"packages/{pkg}/src/{module_name(pkg)}/_version.py"
    newer = None
    for commit in git("log", "--format=%H", "--", file).split():
        version = re.search(r'"(.+)"', git("show", f"{commit}:{file}").splitlines()[-1])[1]
        if not Version(version).is_prerelease:
            # The release is everything up to the commit that began the next version.
            return version, "HEAD" if newer is None else git("rev-parse", f"{newer}^").strip()
        newer = commit
    return None


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout


def released_source(pkg: str, commit: str) -> Path:
    """The package's folder as it was at a commit, among its siblings of then: tests may read theirs."""
    folder = ROOT / ".nox" / f"released-{git('rev-list', '-1', commit).strip()[:12]}"
    if not folder.exists():
        folder.mkdir(parents=True)
        archive = subprocess.run(
            ["git", "archive", commit, "packages", "pyproject.toml", "LICENSE"],
            cwd=ROOT,
            check=True,
            capture_output=True,
        ).stdout
        subprocess.run(["tar", "-x", "-C", str(folder)], input=archive, check=True)
    return folder / "packages" / pkg


# Old tests that are right about the old release only.
EXPECTED_TO_FAIL = {
    "moe-comm 0.1.0": [  # they list every dispatcher that ships
        "packages/moe-comm/tests/test_registry.py::test_a_third_party_dispatcher_is_found_and_chosen",
        "packages/moe-comm/tests/test_registry.py::test_an_unknown_dispatcher_lists_what_is_installed",
    ],
}


def head_version(pkg: str) -> str:
    file = ROOT / "packages" / pkg / "src" / module_name(pkg) / "_version.py"
    (version,) = re.findall(r'__version__ = "(.+)"', file.read_text())
    return str(version)


def sibling_ranges(source: Path) -> dict[str, SpecifierSet]:
    """By package, which versions of its siblings the package in a folder is for."""
    lines = tomllib.loads((source / "pyproject.toml").read_text())["project"]["dependencies"]
    found = {requirement.name: requirement.specifier for requirement in map(Requirement, lines)}
    return {pkg: found[name] for pkg in SIBLINGS if (name := f"moe-stack-{pkg.removeprefix('moe-')}") in found}


@nox.session
@each_package
def released(session: nox.Session, pkg: str) -> None:
    """The package from the checkout beneath the last releases of those that build on it, with their old tests.

    Siblings are those of the release, unless the package needs newer ones. A release that says by its version ranges
    that it does not work with these is not run: that is what an interface change is.
    """
    use_bases(session, tools_base())
    for dependent in [pkg, *(name for name, siblings in SIBLINGS.items() if pkg in siblings)]:
        release = released_commit(dependent)
        if release is None:
            session.log(f"{dependent} has no final release")
            continue
        version, commit = release
        source = released_source(dependent, commit)
        chosen = {name: released_source(name, commit) for name in [*SIBLINGS[dependent], dependent]}
        mine, wanted = {pkg}, sibling_ranges(ROOT / "packages" / pkg)
        for name, admitted in wanted.items():
            old = released_commit(name)
            if old is None or not admitted.contains(old[0], prereleases=True):
                mine.add(name)
        ranges = {} if dependent in mine else sibling_ranges(source)
        # A package keeps its own tests within a minor version.
        ranges[dependent] = ranges.get(dependent, SpecifierSet(f"~={version}"))
        refused = [
            f"{name}{ranges[name]}, not for {head_version(name)}"
            for name in mine
            if name in ranges and not ranges[name].contains(head_version(name), prereleases=True)
        ]
        if refused:
            session.log(f"not run: {dependent} {version} is for {' and '.join(refused)}")
            continue
        install = [str(wheel(name) if name in mine else folder) for name, folder in chosen.items()]
        session.run(
            *["python", "-m", "pip", "install", "-q", "--force-reinstall", "--no-deps", "--no-build-isolation"],
            *install,
            env=QUIET,
        )
        session.log(
            f"{dependent} {version}: its tests over {', '.join(f'{name} {head_version(name)}' for name in mine)}"
        )
        expected = [f"--deselect={test}" for test in EXPECTED_TO_FAIL.get(f"{dependent} {version}", [])]
        with session.chdir(source.parents[1]):
            run_pytest(session, dependent, "-q", *expected)


@nox.session
def typecheck(session: nox.Session) -> None:
    """mypy, strict, on all five packages."""
    use_bases(session, tools_base())
    sources = [str(ROOT / "packages" / pkg / "src") for pkg in SIBLINGS]
    session.run("python", "-m", "mypy", *sources, env={**QUIET, "MYPYPATH": os.pathsep.join(sources)})


@nox.session
def imports(session: nox.Session) -> None:
    """The packages import each other in one direction only."""
    use_bases(session, tools_base())
    sources = os.pathsep.join(str(ROOT / "packages" / pkg / "src") for pkg in SIBLINGS)
    command = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    session.run("python", "-c", command, "--no-cache", env={**QUIET, "PYTHONPATH": sources})


@nox.session
def lint(session: nox.Session) -> None:
    """ruff, and the sizes of files."""
    use_bases(session, tools_base())
    session.run("python", "-m", "ruff", "check", "--no-cache", ".")
    session.run("python", "-m", "ruff", "format", "--no-cache", "--check", ".")
    long = {path: len(path.read_text().splitlines()) for path in (ROOT / "packages").rglob("*.py")}
    long = {path: lines for path, lines in long.items() if lines > 600}
    if long:
        session.error("; ".join(f"{path.relative_to(ROOT)} has {lines} lines" for path, lines in long.items()))


@nox.session
def wheels(session: nox.Session) -> None:
    """Build all wheels, look into them, and use them in an environment with nothing shared."""
    for pkg in SIBLINGS:
        names = set(zipfile.ZipFile(wheel(pkg)).namelist())
        module = module_name(pkg)
        for needed in (f"{module}/py.typed", f"{module}/_version.py"):
            if needed not in names:
                session.error(f"{pkg}: the wheel lacks {needed}")
        strays = [name for name in names if name.split("/")[0] != module and ".dist-info/" not in name]
        if strays:
            session.error(f"{pkg}: the wheel holds {', '.join(strays)}")
        if not any(name.endswith("licenses/LICENSE") for name in names):
            session.error(f"{pkg}: the wheel lacks its licence")
    session.run("python", "-m", "pip", "install", "-q", "-c", str(CONSTRAINTS), *wheels_of("moe-train"), env=QUIET)
    install_wheels(session, "moe-train")
    session.run("python", "-m", "pip", "check", env=QUIET)
    session.run("moe-train", "--help", silent=True)
    session.run("moe-train", "doctor", env=QUIET)


@nox.session
def demo(session: nox.Session) -> None:
    """Train the tiny model on real text."""
    use_bases(session, tools_base())
    install_wheels(session, "moe-train")
    session.run("moe-train", "run", *(session.posargs or ["tiny_moe"]))
