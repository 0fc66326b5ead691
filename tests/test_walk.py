"""Run: pytest tests/test_walk.py

The walk of the settings from `monograph train` (tests/walk.py): how it counts, and that it still
finds its way.
"""

from pathlib import Path

from walk import climbs, package, stops

FILES = {
    "top.py": "from monograph.low import hold\nfrom monograph.other import use\n\n\n"
    "def run(settings):\n    hold(settings)\n    use(settings)\n    partial(again)\n    plain()\n\n\n"
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


def test_train_reads_its_settings_at_the_door_and_does_not_carry_them_through_the_house() -> None:
    """A Job (session/job.py) has what is below the door: more stops or climbs mean that settings
    are passed on again.

    It takes 35 stops and 3 climbs. Of these 8 and 2 are the objectives', which read their own keys,
    and 3 are in model/torch_file.py, whose `settings` are the sizes that a user gave.
    """
    found = package()
    reached = stops(found)
    up = climbs(found, reached)
    said = "\n".join([*map(str, reached), *(f"{one} -> {other}" for one, other in up)])
    assert len(reached) <= 35 and len(up) <= 5, said
    files = {stop.file for stop in reached}
    assert {"session/door.py", "session/recorded.py", "session/objectives/rewards.py"} <= files
    below = {
        "job",
        "plan",
        "setup",
        "session",
        "warmup",
        "brief",
        "eager_start",
        "reporting",
        "after_update",
        "rewind",
    }
    assert files.isdisjoint(f"session/{name}.py" for name in below)
