"""Run: pytest tests/test_walk.py

The walk of the settings from `monograph train` (tests/walk.py): how it counts, and that it still finds its way.
"""

from pathlib import Path

from walk import climbs, package, stops

FILES = {
    "top.py": "from monograph.low import hold\nfrom monograph.other import use\n\n\n"
    "def run(settings):\n    hold(settings)\n    use(settings)\n    again(settings)\n    plain()\n\n\n"
    "def again(plan):\n    return plan.settings\n\n\ndef plain():\n    return 1\n",
    "other.py": "from monograph.low import hold\n\n\ndef use(given: Settings):\n    hold(given)\n",
    "low.py": "def hold(settings):\n    return Kept.of(settings).kept()\n\n\n"
    "class Kept:\n    def kept(self):\n        return self.settings\n",
}


def test_stops_and_climbs_are_counted_as_they_are_defined(tmp_path: Path) -> None:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    found = package(tmp_path)
    reached = stops(found, ("top.py", "run"))
    assert [str(stop) for stop in reached] == [
        "top.py:run",
        "low.py:hold",
        "low.py:Kept.kept",
        "other.py:use",
        "top.py:again",
    ]
    assert [(one.file, other.file) for one, other in climbs(found, reached)] == [
        ("low.py", "other.py"),
        ("other.py", "top.py"),
    ]


def test_the_walk_from_train_reaches_the_plan_and_the_objectives() -> None:
    found = package()
    reached = stops(found)
    print(f"{len(reached)} stops, {len(climbs(found, reached))} climbs")
    files = {stop.file for stop in reached}
    assert {"session/resolve.py", "session/recorded.py", "session/objectives/rewards.py"} <= files
