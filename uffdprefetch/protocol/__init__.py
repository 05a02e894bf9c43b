# SPDX-License-Identifier: Apache-2.0
"""What processes say to each other: the messages of wire.h, a launcher's end of a socket."""
