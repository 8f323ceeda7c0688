"""What a training script imports beside trainers and configs, under TRL's names.

`arguments` and `parser` read a command line and its YAML file, `models` and `templates` make what the command line
describes, `rows` and `datasets` reshape data, `collators` are for those who pass one. Each is lowtide's own, on what
transformers, peft and datasets have, and gives what TRL 1.16's function of the same name gives; where one differs, its
docstring says so. `elsewhere` lists TRL's names that are not here, and what to use instead.
"""
