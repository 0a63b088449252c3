"""How the kernels are compiled, the instruction sets of a build, and what Python packs for them."""

import importlib.util
import os
import subprocess
import sys

import pytest

from pmaf import native
from tests.builds import ROOT, package_with

pytestmark = pytest.mark.skipif(not native.available, reason=f"no kernels: {native.about}")


def load_script():
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


script = load_script()
compiler = script.compiler()
needs_compiler = pytest.mark.skipif(compiler is None, reason="needs a C++ compiler")


def test_every_unit_is_compiled():
    files = {path.stem for path in (script.NATIVE / "kernels").glob("*.cpp")}
    assert files == {*script.UNITS, "library"}


@needs_compiler
class TestChoiceOfInstructionSets:
    def chosen(self, monkeypatch, named, default="own"):
        monkeypatch.setenv("PMAF_SETS", named)
        return script.chosen_sets(compiler, default)

    @pytest.mark.skipif("PMAF_NATIVE" in os.environ, reason="PMAF_NATIVE has chosen the set")
    def test_own_is_the_one_that_the_library_takes(self, monkeypatch):
        (own,) = self.chosen(monkeypatch, "own")
        if own not in native.held:
            pytest.skip(f"the build holds {', '.join(native.held)}, and not the best set, {own}")
        assert native.about == own

    def test_names_in_any_order(self, monkeypatch):
        assert self.chosen(monkeypatch, "all") == [*script.SETS]
        assert self.chosen(monkeypatch, ",".join(reversed(script.SETS))) == [*script.SETS]
        assert self.chosen(monkeypatch, "baseline") == ["baseline"]

    def test_without_the_variable_the_kind_of_install_decides(self, monkeypatch):
        assert self.chosen(monkeypatch, "", "all") == [*script.SETS]
        assert self.chosen(monkeypatch, "", "own") == self.chosen(monkeypatch, "own")

    def test_an_unknown_name(self, monkeypatch):
        with pytest.raises(ValueError, match="PMAF_SETS=baseline,mmx: 'mmx' is no instruction set"):
            self.chosen(monkeypatch, "baseline,mmx")

    def test_a_compiler_that_knows_no_native_set_compiles_the_baseline(self):
        assert script.own_set(["true"]) == "baseline"
        assert script.own_set(["no-such-compiler"]) == "baseline"


@needs_compiler
def test_an_editable_install_holds_one_set_and_others_hold_all(monkeypatch, tmp_path):
    """What the hook of hatch passes on for each version of a build."""
    asked = []
    monkeypatch.setattr(script, "build", lambda *arguments: asked.append(arguments[-1]) or "no")
    monkeypatch.setattr(script, "NATIVE", tmp_path)

    class Hook(script.CustomBuildHook):
        def __init__(self):
            pass

        class app:  # noqa: N801
            display_warning = staticmethod(lambda text: None)

    for version in ("editable", "standard"):
        Hook().initialize(version, {})
    assert asked == ["own", "all"]


ABOUT = "import pmaf; print(pmaf.native.held, pmaf.native.about, sep='; ')"


@needs_compiler
def test_a_build_of_one_set_says_what_it_holds(tmp_path):
    source = package_with("baseline", tmp_path, "-O0")

    def about(setting):
        path = os.pathsep.join([str(source), *sys.path])
        return subprocess.run(
            [sys.executable, "-c", ABOUT],
            env=os.environ | {"PMAF_NATIVE": setting, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()

    assert about("") == about("baseline") == "('baseline',); baseline"
    lacking = "which this build does not have: it holds baseline"
    assert about("avx2") == f"(); PMAF_NATIVE=avx2, {lacking}"


class TestStructures:
    def test_python_packs_what_the_library_reads(self):
        assert native._library.pmaf_structures().decode() == native._structures()

    @pytest.mark.parametrize(
        ("name", "fields"),
        [
            ("pmaf_forward", (9, "liiiPdddd")),  # two members that have changed places
            ("pmaf_less_forward", (8, "liiP")),  # an address too many
            ("pmaf_less_backward", (9, "li")),  # an option too few, at the end
            ("pmaf_posed_forward", (11, "liiiiiiildd")),  # another size
        ],
    )
    def test_a_library_that_reads_others_is_refused(self, monkeypatch, name, fields):
        monkeypatch.setitem(native._FUNCTIONS, name, fields)
        library, about = native._load()
        assert library is None
        assert f"reads other structures in {name}; install pmaf again" in about
