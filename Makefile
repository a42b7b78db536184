# Short forms for systems that have make. run.py does the work.
.PHONY: demo test check docs bench walk mutants t
demo test check docs bench walk mutants:
	@python3 run.py $@ $(ARGS)

# The tests of one file, until the first failure: make t F=tests/engine/test_policy.py
t:
	@python3 run.py test -q -x $(or $(F),$(error Name the file: make t F=tests/engine/test_policy.py))
