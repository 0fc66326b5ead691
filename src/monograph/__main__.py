"""`python -m monograph` is the command `monograph`."""

from monograph import interrupts

interrupts.handle_while_starting()

from monograph.cli import main  # noqa: E402 - after the handlers, because this import takes time

if __name__ == "__main__":
    main()
