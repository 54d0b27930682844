#!/usr/bin/env bash
# A real control plane on loopback: etcd, kube-apiserver, kube-scheduler, kube-controller-manager. Prints the
# KUBECONFIG to use, and the PATH with its kubectl; everything else goes to stderr. Running it again restarts processes that have ended.
#
#   hack/testbed/up.sh [FOLDER]      FOLDER holds data, certificates, logs, pids and ports; default: a new folder
#   hack/testbed/down.sh FOLDER...   ends it and removes the folder
#
# OWNER=pid        ends and removes everything when that process ends, however it ends
# GRACE=24h        node-monitor-grace-period: nodes stay Ready without a heartbeat
# API_ARGS, KCM_ARGS, SCHED_ARGS, ETCD_ARGS   further flags
set -euo pipefail
. "$(dirname "$0")/lib.sh"
"$testbed/build.sh"
run=$(realpath -m "${1:-$(mktemp -d "${TMPDIR:-/tmp}/archaware-testbed.XXXXXX")}")
pki=$run/pki
mkdir -p "$pki" "$run/etcd" "$run/kubeconfig"

if [ ! -s "$run/ports" ]; then
  { read -r API; read -r ETCD; read -r PEER; read -r SCHED; read -r KCM; } < <(free_ports 5)
  echo "API=$API ETCD=$ETCD PEER=$PEER SCHED=$SCHED KCM=$KCM" > "$run/ports"
fi
# shellcheck disable=SC1091
. "$run/ports"

leaf() { # NAME SUBJECT USAGE [NAMES]
  openssl ecparam -name prime256v1 -genkey -noout -out "$pki/$1.key"
  openssl req -new -key "$pki/$1.key" -subj "$2" -out "$pki/$1.csr" 2> /dev/null
  {
    echo "basicConstraints=CA:FALSE"
    echo "keyUsage=critical,digitalSignature"
    echo "extendedKeyUsage=$3"
    [ -z "${4:-}" ] || echo "subjectAltName=$4"
  } > "$pki/$1.ext"
  openssl x509 -req -in "$pki/$1.csr" -CA "$pki/ca.crt" -CAkey "$pki/ca.key" -CAcreateserial \
    -days 3650 -extfile "$pki/$1.ext" -out "$pki/$1.crt" 2> /dev/null
}

if [ ! -s "$pki/done" ]; then
  openssl ecparam -name prime256v1 -genkey -noout -out "$pki/ca.key"
  openssl req -x509 -new -key "$pki/ca.key" -subj /CN=testbed -days 3650 -out "$pki/ca.crt" \
    -addext basicConstraints=critical,CA:TRUE -addext keyUsage=critical,keyCertSign,cRLSign,digitalSignature 2> /dev/null
  # ServiceAccount tokens are signed with RSA by every distribution: the same here.
  openssl genrsa -out "$pki/sa.key" 2048 2> /dev/null
  openssl rsa -in "$pki/sa.key" -pubout -out "$pki/sa.pub" 2> /dev/null
  leaf apiserver /CN=kube-apiserver serverAuth "IP:127.0.0.1,DNS:localhost,DNS:kubernetes.default.svc,IP:10.96.0.1"
  leaf serving /CN=localhost serverAuth "IP:127.0.0.1,DNS:localhost"
  leaf admin /O=system:masters/CN=admin clientAuth
  leaf scheduler /CN=system:kube-scheduler clientAuth
  leaf controller-manager /CN=system:kube-controller-manager clientAuth
  leaf kubelet /O=system:nodes/CN=system:node:localhost clientAuth
  leaf kubelet-client /O=system:masters/CN=kube-apiserver-kubelet-client clientAuth
  echo complete > "$pki/done"
fi
for name in admin scheduler controller-manager kubelet; do
  cat > "$run/kubeconfig/$name" <<EOF
apiVersion: v1
kind: Config
clusters: [{name: testbed, cluster: {server: "https://127.0.0.1:$API", certificate-authority: $pki/ca.crt}}]
users: [{name: $name, user: {client-certificate: $pki/$name.crt, client-key: $pki/$name.key}}]
contexts: [{name: testbed, context: {cluster: testbed, user: $name}}]
current-context: testbed
EOF
done

get() { curl -fsS --max-time 5 --cacert "$pki/ca.crt" --cert "$pki/admin.crt" --key "$pki/admin.key" "$1"; }

# shellcheck disable=SC2086
alive "$run" etcd || start "$run" etcd "$bin/etcd" --data-dir "$run/etcd" \
  --listen-client-urls "http://127.0.0.1:$ETCD" --advertise-client-urls "http://127.0.0.1:$ETCD" \
  --listen-peer-urls "http://127.0.0.1:$PEER" --initial-advertise-peer-urls "http://127.0.0.1:$PEER" \
  --initial-cluster "default=http://127.0.0.1:$PEER" --unsafe-no-fsync=true --quota-backend-bytes=8589934592 \
  --auto-compaction-mode=periodic --auto-compaction-retention=5m --log-level=warn ${ETCD_ARGS:-}
# An Endpoints address may not be loopback, so none is reconciled.
# shellcheck disable=SC2086
alive "$run" kube-apiserver || start "$run" kube-apiserver "$bin/kube-apiserver" \
  --etcd-servers="http://127.0.0.1:$ETCD" --bind-address=127.0.0.1 --secure-port="$API" \
  --advertise-address=127.0.0.1 --endpoint-reconciler-type=none \
  --tls-cert-file="$pki/apiserver.crt" --tls-private-key-file="$pki/apiserver.key" --client-ca-file="$pki/ca.crt" \
  --kubelet-client-certificate="$pki/kubelet-client.crt" --kubelet-client-key="$pki/kubelet-client.key" \
  --kubelet-preferred-address-types=Hostname --service-account-issuer=https://kubernetes.default.svc \
  --service-account-key-file="$pki/sa.pub" --service-account-signing-key-file="$pki/sa.key" \
  --service-cluster-ip-range=10.96.0.0/16 --authorization-mode=Node,RBAC --anonymous-auth=false \
  --allow-privileged=true --event-ttl=10m --profiling=false ${API_ARGS:-}
wait_for 60 "a ready API server (see $run/log/kube-apiserver.log)" get "https://127.0.0.1:$API/readyz"

component() { # NAME PORT CONFIGNAME FLAGS...: what scheduler and controller-manager have in common
  local name=$1 port=$2 config=$run/kubeconfig/$3
  shift 3
  alive "$run" "$name" || start "$run" "$name" "$bin/$name" --authentication-kubeconfig="$config" \
    --authorization-kubeconfig="$config" --bind-address=127.0.0.1 --secure-port="$port" --client-ca-file="$pki/ca.crt" \
    --tls-cert-file="$pki/serving.crt" --tls-private-key-file="$pki/serving.key" "$@"
}
# shellcheck disable=SC2086
component kube-controller-manager "$KCM" controller-manager --kubeconfig="$run/kubeconfig/controller-manager" \
  --service-account-private-key-file="$pki/sa.key" --root-ca-file="$pki/ca.crt" --leader-elect=false \
  --use-service-account-credentials=true --node-monitor-grace-period="${GRACE:-24h}" \
  --kube-api-qps=200 --kube-api-burst=400 ${KCM_ARGS:-}
cat > "$run/scheduler.yaml" <<EOF
apiVersion: kubescheduler.config.k8s.io/v1
kind: KubeSchedulerConfiguration
clientConnection: {kubeconfig: $run/kubeconfig/scheduler, qps: 500, burst: 1000}
leaderElection: {leaderElect: false}
EOF
# shellcheck disable=SC2086
component kube-scheduler "$SCHED" scheduler --config="$run/scheduler.yaml" ${SCHED_ARGS:-}
wait_for 60 "a healthy controller-manager" get "https://127.0.0.1:$KCM/healthz"
wait_for 60 "a healthy scheduler" get "https://127.0.0.1:$SCHED/healthz"
wait_for 60 "the default ServiceAccount" "$bin/kubectl" --kubeconfig "$run/kubeconfig/admin" get serviceaccount default

if [ -n "${OWNER:-}" ] && ! alive "$run" watchdog.sh; then
  start "$run" watchdog.sh "$testbed/watchdog.sh" "$OWNER" "$run"
fi
echo "export KUBECONFIG=$run/kubeconfig/admin PATH=$bin:\$PATH"
