"""How fast, beside what others run: one command is one run with all contenders taking turns."""
