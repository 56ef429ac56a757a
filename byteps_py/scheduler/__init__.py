"""The scheduler, and the way to it over gRPC.

core          a pure state machine: the only door to the components below
job           the state of the whole job, which the components share
roster        pure: the configured cluster, its members, and epochs
membership    pure: how the first epoch opens; how summation services come and go
elastic       pure: how the ranks of an elastic job form groups
rank_group    pure: what ranks agree on: tensors, barriers, joins, shutdown
health        pure: who is dead, who is slow
stalls        pure: which ranks others wait for
member_links  members' links outlive connections, and the scheduler by its journal
service       the only component that listens; with call_authenticator
client        a member's link: over gRPC (grpc_link), or to a core in its own process
query         what `bps` asks a running scheduler
rpc           how all of them use gRPC
"""
