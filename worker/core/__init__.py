"""What a communication service decides: events and the time go in, actions come out.

No module here imports sockets, threads, clocks or the rooms beside it (``test_structure.py``), so all of it runs
in the simulator as it does in a process. Owned by the loop's thread.
"""
