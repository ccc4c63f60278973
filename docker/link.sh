# Usage: link.sh RATE, such as 200mbit. Needs NET_ADMIN.
set -eu
tc qdisc replace dev eth0 root tbf rate "$1" burst 256kb latency 400ms
echo "eth0 sends at most $1"
exec sleep infinity
