"""`python -m grmoe`: the command line where the script is not on the PATH."""

from grmoe.cli import main

if __name__ == "__main__":
    main()
