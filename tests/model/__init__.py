"""The protocol of one key as a model small enough to look at every state it can be in.

It is changed before the code is: a rule that is not in here was not thought through. Store operations are atomic, as the
contract has it; everything between two of them may happen in any order, and anybody may vanish at any point.
"""
