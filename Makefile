# Shorthand for those who have make; everything is in run.py.
.PHONY: demo test check bench
demo test check bench:
	@python3 run.py $@ $(ARGS)
