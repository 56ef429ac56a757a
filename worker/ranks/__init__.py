"""The local ranks of a communication service: how they come and go, what they ask for, and what they wait for. Owned by
the loop's thread.
"""
