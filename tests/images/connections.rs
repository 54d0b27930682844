//! Connections that a host closes between two requests.

use futures::future::join_all;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt, copy},
    net::{TcpListener, TcpStream},
    sync::oneshot,
};

use super::*;

/// A load balancer that closes each connection when it gets its second request. Returns its
/// address.
async fn load_balancer(registry: &FakeRegistry) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let (address, upstream) = (listener.local_addr().unwrap(), registry.address());
    tokio::spawn(async move {
        while let Ok((client, _)) = listener.accept().await {
            tokio::spawn(forward_one(client, upstream.clone()));
        }
    });
    address.to_string()
}

async fn forward_one(client: TcpStream, upstream: String) {
    let mut server = TcpStream::connect(upstream).await.unwrap();
    let (mut from_client, mut to_client) = client.into_split();
    let mut request = vec![0; 16 << 10];
    // Requests without body arrive in one piece.
    let length = from_client.read(&mut request).await.unwrap_or_default();
    server.write_all(&request[..length]).await.unwrap();
    let (mut from_server, _to_server) = server.into_split();
    let (ended, second_request) = oneshot::channel();
    let answering = async {
        tokio::select! {
            _ = copy(&mut from_server, &mut to_client) => {}
            _ = second_request => {}
        }
    };
    let waiting = async {
        let _ = from_client.read(&mut request).await;
        let _ = ended.send(());
    };
    tokio::join!(answering, waiting);
}

#[tokio::test]
async fn a_request_that_dies_on_a_kept_connection_is_sent_again() {
    let (registry, resolver) = (registry().await, resolver());
    let names: Vec<_> = (0..24).map(|number| format!("app{number}")).collect();
    for name in &names {
        registry.add(name, &testimg::find("multi"));
    }
    let address = load_balancer(&registry).await;
    for round in names.chunks(8) {
        let resolving = round.iter().map(|name| {
            let image = format!("{address}/{name}");
            let resolver = resolver.clone();
            async move {
                resolve(&resolver, &image)
                    .await
                    .map(|found| platforms(&found))
            }
        });
        for found in join_all(resolving).await {
            assert_eq!(found.unwrap().len(), 3);
        }
    }
}
