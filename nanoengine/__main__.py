"""`python -m nanoengine "a prompt"`: see nanoengine_extensions/terminal.py."""

from nanoengine_extensions.terminal import main

main()
