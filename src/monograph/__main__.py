"""`python -m monograph` is the command `monograph`."""

from monograph import interrupts

interrupts.while_starting()

from monograph.cli import main  # noqa: E402 - what it imports takes time

if __name__ == "__main__":
    main()
