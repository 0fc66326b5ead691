"""Inputs made by somebody who means harm, and the process in which they are tried; see server.py."""
