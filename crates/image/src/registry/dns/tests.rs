use std::time::Instant;

use hickory_resolver::{
    config::ConnectionConfig,
    proto::{
        op::Message,
        rr::{RData, Record},
    },
};
use tokio::{net::UdpSocket, task::AbortHandle};

use super::*;

/// A name server on loopback that knows some names, and never answers for the domain `silent.test`.
struct NameServer {
    port: u16,
    task: AbortHandle,
}

impl Drop for NameServer {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl NameServer {
    async fn start(names: &'static [(&'static str, &'static [&'static str])]) -> Self {
        let socket = UdpSocket::bind("127.0.0.1:0").await.unwrap();
        let port = socket.local_addr().unwrap().port();
        let serving = async move {
            let mut buffer = [0; 1500];
            loop {
                let (length, from) = socket.recv_from(&mut buffer).await.unwrap();
                let query = Message::from_vec(&buffer[..length]).unwrap();
                if let Some(answer) = answer(&query, names) {
                    let bytes = answer.to_vec().unwrap();
                    socket.send_to(&bytes, from).await.unwrap();
                }
            }
        };
        let task = tokio::spawn(serving).abort_handle();
        Self { port, task }
    }

    fn dns(&self, allowed: &[&str]) -> Dns {
        self.dns_with(&[], 1, Hosts::default(), allowed)
    }

    fn dns_with(&self, search: &[&str], ndots: usize, hosts: Hosts, allowed: &[&str]) -> Dns {
        let mut udp = ConnectionConfig::udp();
        udp.port = self.port;
        let server = NameServerConfig::new(Ipv4Addr::LOCALHOST.into(), true, vec![udp]);
        let search = search
            .iter()
            .map(|name| Name::from_ascii(name).unwrap())
            .collect();
        let config = ResolverConfig::from_parts(None, search, vec![server]);
        let mut options = ResolverOpts::default();
        options.ndots = ndots;
        let allowed = allowed.iter().map(|host| (*host).to_owned()).collect();
        Dns::build(config, options, hosts, allowed)
    }
}

fn answer(query: &Message, names: &[(&str, &[&str])]) -> Option<Message> {
    let question = query.queries.first()?.clone();
    let name = question.name().to_utf8();
    let name = name.trim_end_matches('.').to_ascii_lowercase();
    let half = name == "half.test" && question.query_type() == RecordType::AAAA;
    if name.ends_with("silent.test") || half {
        return None;
    }
    let mut answer = Message::response(query.id, query.op_code);
    answer.add_query(question.clone());
    let found = names.iter().find(|(known, _)| *known == name);
    if found.is_none() {
        answer.metadata.response_code = ResponseCode::NXDomain;
    }
    for address in found
        .into_iter()
        .flat_map(|(_, addresses)| addresses.iter())
    {
        let data = match (address.parse().unwrap(), question.query_type()) {
            (IpAddr::V4(ip), RecordType::A) => RData::A(ip.into()),
            (IpAddr::V6(ip), RecordType::AAAA) => RData::AAAA(ip.into()),
            _ => continue,
        };
        answer.add_answer(Record::from_rdata(question.name().clone(), 60, data));
    }
    Some(answer)
}

const NAMES: &[(&str, &[&str])] = &[
    ("registry.test", &["192.0.2.1", "2001:db8::1"]),
    ("private.test", &["10.0.0.1"]),
    // The name server never answers the AAAA query for this name.
    ("half.test", &["192.0.2.3"]),
    ("loop.test", &["127.0.0.1"]),
    ("metadata.test", &["169.254.169.254"]),
    ("mapped.test", &["::ffff:127.0.0.1"]),
    ("both.test", &["127.0.0.1", "192.0.2.2"]),
];

async fn addresses(dns: &Dns, name: &str, check: AddressCheck) -> Result<Vec<String>, String> {
    let found = dns.addresses(name, check).await;
    let found = found.map_err(|error| error.to_string())?;
    let mut found: Vec<_> = found.iter().map(ToString::to_string).collect();
    found.sort();
    Ok(found)
}

#[tokio::test]
async fn addresses_are_checked_after_the_name_is_resolved() {
    let server = NameServer::start(NAMES).await;
    let dns = server.dns(&["LOOP.test"]);
    let refusing = AddressCheck::RefuseLocal;
    for (name, expected) in [
        ("registry.test", Some(vec!["192.0.2.1", "2001:db8::1"])),
        // Registries in the cluster have private addresses.
        ("private.test", Some(vec!["10.0.0.1"])),
        ("half.test", Some(vec!["192.0.2.3"])),
        ("loop.test", Some(vec!["127.0.0.1"])),
        ("metadata.test", None),
        ("mapped.test", None),
        ("both.test", Some(vec!["192.0.2.2"])),
        ("absent.test", None),
        ("localhost", Some(vec!["127.0.0.1", "::1"])),
    ] {
        let started = Instant::now();
        let found = addresses(&dns, name, refusing).await;
        assert!(
            started.elapsed() < QUERY_TIMEOUT,
            "{name}: {:?}",
            started.elapsed()
        );
        match expected {
            Some(expected) => assert_eq!(found.unwrap(), expected, "{name}"),
            None => assert!(found.is_err(), "{name}: {found:?}"),
        }
    }
    let refused = addresses(&dns, "metadata.test", refusing)
        .await
        .unwrap_err();
    assert!(
        refused.contains("169.254.169.254") && refused.contains("registries.allowLocalAddresses")
    );
    // Hosts in the operator's hosts.toml may have any address.
    let allowed = addresses(&dns, "metadata.test", AddressCheck::AllowAll).await;
    assert_eq!(allowed.unwrap(), ["169.254.169.254"]);
}

#[tokio::test]
async fn names_that_are_never_answered_hold_up_no_others() {
    let server = NameServer::start(NAMES).await;
    let dns = server.dns(&[]);
    let waiting: Vec<_> = (0..1000)
        .map(|number| {
            let (dns, name) = (dns.clone(), format!("r{number}.silent.test"));
            tokio::spawn(async move { addresses(&dns, &name, AddressCheck::RefuseLocal).await })
        })
        .collect();
    // Wait until lookups have taken all slots of the domain.
    let slots = loop {
        if let Some(slots) = dns.0.domains.get("silent.test")
            && slots.available_permits() == 0
        {
            break slots;
        }
        tokio::task::yield_now().await;
    };
    let started = Instant::now();
    let found = addresses(&dns, "registry.test", AddressCheck::RefuseLocal).await;
    assert_eq!(found.unwrap().len(), 2);
    assert!(started.elapsed() < QUERY_TIMEOUT, "{:?}", started.elapsed());
    assert_eq!(slots.available_permits(), 0, "at most eight of a domain");
    for task in waiting {
        task.abort();
    }
}

/// As in a pod (`ndots:5`): names with fewer than five dots are tried with search domains first.
#[tokio::test]
async fn search_domains_and_the_hosts_file() {
    let server = NameServer::start(&[
        ("reg.ns.svc.cluster.test", &["10.0.0.7"]),
        ("registry.example", &["192.0.2.9"]),
        ("my_registry.ns.svc.cluster.test", &["10.0.0.8"]),
    ])
    .await;
    let mut hosts = Hosts::default();
    let file = "192.0.2.77 registry.air-gapped.example\n192.0.2.78 registry.example.hosts\n";
    hosts.read_hosts_conf(file.as_bytes()).unwrap();
    let search = ["ns.svc.cluster.test.", "svc.cluster.test.", "cluster.test."];
    let dns = server.dns_with(&search, 5, hosts, &[]);
    for (name, expected) in [
        ("reg", Some("10.0.0.7")),
        ("reg.ns.svc", Some("10.0.0.7")),
        ("reg.ns.svc.cluster.test.", Some("10.0.0.7")),
        ("my_registry", Some("10.0.0.8")),
        ("registry.example", Some("192.0.2.9")),
        ("registry.example.", Some("192.0.2.9")),
        ("Registry.Air-gapped.example", Some("192.0.2.77")),
        ("registry.example.hosts", Some("192.0.2.78")),
        ("reg.", None),
    ] {
        // The second lookup tests the cached answer.
        for _ in 0..2 {
            let found = addresses(&dns, name, AddressCheck::RefuseLocal).await;
            let expected = expected.map(|address| vec![address.to_owned()]);
            assert_eq!(found.ok(), expected, "{name}");
        }
    }
}

#[test]
fn services_of_a_namespace_share_a_line() {
    for (name, line) in [
        ("reg.team.svc.cluster.local", "team.svc.cluster.local"),
        ("a.b.team.svc.cluster.local", "team.svc.cluster.local"),
        ("a.b.example.com", "example.com"),
        ("registry", "registry"),
    ] {
        assert_eq!(queue_key(name), line, "{name}");
    }
}
