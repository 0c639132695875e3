# Shortcuts for the commands in README and CONTRIBUTING; installing and training need none of them.
.PHONY: quickstart test check doctor tensorboard-remote

quickstart:
	bash examples/quickstart.sh

test:
	bash tests/run.sh

check:
	bash tests/check.sh

doctor:
	python tools/doctor.py

# Shows the TensorBoard of another machine at http://localhost:16006: make tensorboard-remote ip=192.0.2.7 user=ubuntu
user ?= ubuntu
tensorboard-remote:
	@test -n "$(ip)" || { echo "give the machine: make tensorboard-remote ip=192.0.2.7"; exit 64; }
	ssh -N -f -L localhost:16006:localhost:6006 "$(user)@$(ip)"
