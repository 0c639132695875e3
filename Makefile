# Thin names for the commands of README and CONTRIBUTING; nothing here is needed to install or to train.
.PHONY: quickstart test check doctor

quickstart:
	bash examples/quickstart.sh

test:
	bash tests/run.sh

check:
	bash tests/check.sh

doctor:
	python tools/doctor.py
