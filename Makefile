# Shortcuts for the commands in README and CONTRIBUTING; installing and training need none of them.
.PHONY: quickstart test check doctor

quickstart:
	bash examples/quickstart.sh

test:
	bash tests/run.sh

check:
	bash tests/check.sh

doctor:
	python tools/doctor.py
