"""The command line whose `train` and `sweep` open their job in full, and are stopped before the
first update.
"""

from __future__ import annotations

from typing import NoReturn


def main() -> None:
    import monograph.commands.train as train
    from monograph import cli
    from monograph.device import default_device, describe
    from monograph.errors import Stopped
    from monograph.session import warmup
    from monograph.session.resolve import resolve
    from monograph.sweeps.cohort import build_models, make_members_engine
    from monograph.sweeps.progress import SweepProgress
    from monograph.sweeps.spec import have_own_rows

    def stop(*_: object) -> NoReturn:
        raise Stopped("opened")

    def open_members(self: SweepProgress, *_: object) -> NoReturn:
        for member in self.members:
            member.plan = resolve(member.settings, describe())
        for group, task in zip(self.groups, self._open_tasks(), strict=True):
            built_runs = build_models(group.members[:2], task, describe())
            own_rows = have_own_rows([built.plan for built in built_runs])
            make_members_engine(built_runs, own_rows, default_device())
        raise Stopped("opened")

    warmup.CALIBRATION_S = 0.0
    train._loop = stop
    SweepProgress.prepare = open_members  # type: ignore[method-assign]
    cli.main()
