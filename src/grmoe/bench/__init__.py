"""Speed, memory and errors next to other libraries. One command is one run in which all contenders take turns."""
