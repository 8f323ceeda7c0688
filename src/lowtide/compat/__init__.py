"""What is overridden or patched in other libraries: a module a library, each with the reason."""
